"""Strict reading of a Hugging Face config.json: every attribute is used, known to be harmless, or refused by name."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from trillion_infer.config.model import Rope, RopeScaling
from trillion_infer.core.errors import UnsupportedModelError

HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _name_or_path add_cross_attention architectures
    attention_dropout auto_map bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id dtype embd_pdrop eos_token_id finetuning_task
    forced_bos_token_id forced_eos_token_id hidden_dropout id2label initializer_range is_decoder
    is_encoder_decoder is_llama_config label2id model_type output_attentions output_hidden_states pad_token_id
    prefix pretraining_tp problem_type pruned_heads quantization_config resid_pdrop return_dict sep_token_id
    task_specific_params tie_encoder_decoder tie_word_embeddings tokenizer_class torch_dtype torchscript
    transformers.js_config transformers_version unsloth_fixed unsloth_version use_bfloat16 use_cache
    output_router_logits router_aux_loss_coef router_jitter_noise aux_loss_alpha seq_aux ep_size
    max_position_embeddings vocab_size hidden_size num_hidden_layers _sliding_window_pattern
    """.split()
)
"""Attributes of training, of the Hugging Face runtime, or read for every family by `read_common`."""

_MISSING = object()


class HFConfig:
    """A config.json that remembers what was read.

    `take` reads, `expect` reads and refuses any value but those implemented, `finish` refuses what is left.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "config.json"):
        self._values = dict(values)
        self._left = {name for name in values if name not in HARMLESS}
        self.where = where

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def take(self, name: str, default: Any = _MISSING) -> Any:
        """The attribute; its default where it is absent or null."""
        self._left.discard(name)
        value = self._values.get(name)
        if value is not None:
            return value
        if default is _MISSING:
            raise UnsupportedModelError(f"{self.where} has no {name}, which this architecture needs.")
        return default

    def expect(self, name: str, default: Any, allowed: Iterable[Any]) -> Any:
        value = self.take(name, default)
        allowed = tuple(allowed)
        if value not in allowed:
            choices = ", ".join(repr(a) for a in allowed)
            raise UnsupportedModelError(f"{self.where} sets {name} to {value!r}; implemented: {choices}.")
        return value

    def nested(self, name: str) -> "HFConfig":
        value = self.take(name)
        if not isinstance(value, Mapping):
            raise UnsupportedModelError(f"{self.where}: {name} is {type(value).__name__}, not an object.")
        return HFConfig(value, f"{self.where}: {name}")

    def ignore(self, *names: str) -> None:
        self._left.difference_update(names)

    def finish(self) -> None:
        """Refuse attributes that nobody read: they may change the mathematics."""
        left = sorted(name for name in self._left if self._values[name] is not None)
        if left:
            given = ", ".join(f"{name}={self._values[name]!r}" for name in left)
            raise UnsupportedModelError(
                f"{self.where} has attributes that this architecture does not handle: {given}. Remove them if they "
                "have no effect, or implement them."
            )


def read_rope(config: HFConfig, dim: int, *, default_theta: float = 10000.0, interleaved: bool = False) -> Rope:
    """Rope from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    parameters = config.take("rope_parameters", None) or {}
    scaling = config.take("rope_scaling", None) or {}
    theta = config.take("rope_theta", None)
    max_len = config.take("max_position_embeddings", 0)
    merged = {**scaling, **parameters}
    theta = float(merged.pop("rope_theta", None) or theta or default_theta)
    return Rope(theta, dim, parse_scaling(merged, max_len, config.where), interleaved)


def parse_scaling(values: Mapping[str, Any], max_len: int, where: str) -> RopeScaling | None:
    """A `rope_scaling` object; both `type` and `rope_type` name the kind. Unknown kinds and keys are refused."""
    left = HFConfig(values, f"{where}: rope_scaling")
    kind = left.take("rope_type", None)
    kind = left.take("type", None) if kind is None else kind
    left.ignore("type")
    if kind in (None, "default"):
        left.ignore("original_max_position_embeddings", "factor")
        left.finish()
        return None
    if kind not in ("linear", "dynamic", "llama3", "yarn"):
        raise UnsupportedModelError(
            f"{where}: rope_scaling is of type {kind!r}; implemented: default, linear, dynamic, llama3, yarn."
        )
    factor = float(left.take("factor"))
    original = int(left.take("original_max_position_embeddings", max_len))
    extra: dict[str, Any] = {}
    if kind == "llama3":
        extra = {name: float(left.take(name)) for name in ("low_freq_factor", "high_freq_factor")}
    if kind == "yarn":
        extra = _yarn_terms(left, factor)
    left.finish()
    return RopeScaling(kind, factor, original, **extra)


def _yarn_terms(values: HFConfig, factor: float) -> dict[str, Any]:
    """YaRN (arXiv 2309.00071) with DeepSeek's mscale pair: cos and sin are scaled by mscale(mscale)/mscale(all)."""
    mscale, mscale_all = values.take("mscale", 0), values.take("mscale_all_dim", 0)
    attention_factor = values.take("attention_factor", None)
    if attention_factor is None:
        if mscale and mscale_all:
            attention_factor = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all)
        else:
            attention_factor = yarn_mscale(factor, 1.0)
    return {
        "beta_fast": float(values.take("beta_fast", 32)),
        "beta_slow": float(values.take("beta_slow", 1)),
        "attention_factor": float(attention_factor),
        "truncate": bool(values.take("truncate", True)),
    }


def yarn_mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def eos_union(*sources: Mapping[str, Any]) -> frozenset[int]:
    """Every end-of-sequence id that config.json, its text part or generation_config.json names."""
    ids: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id") if source else None
        ids.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return frozenset(ids)

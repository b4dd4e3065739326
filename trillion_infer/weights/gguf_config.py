"""GGUF metadata to the config.json that Hugging Face publishes for the same model."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from trillion_infer.core.errors import UnsupportedModelError

_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
_REQUIRED = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
}
_HANDLED = {
    *_REQUIRED,
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.sliding_window",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "vocab_size",
}
_GEMMA3_PERIOD = 6  # five sliding layers, then one that sees everything


def config_from_gguf(metadata: Mapping[str, Any], tied: bool, freq_factors: np.ndarray | None) -> dict[str, Any]:
    """The config.json equivalent.

    `tied` says that the file has no output matrix; `freq_factors` is its `rope_freqs.weight`, if any.
    Raises UnsupportedModelError for an architecture or a metadata key of it that is not implemented.
    """
    arch = metadata.get("general.architecture")
    if arch not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"the GGUF's architecture is {arch!r}; supported in GGUF: {', '.join(sorted(_ARCHITECTURES))}. "
            "Other families load from Hugging Face directories"
        )
    values = {k.removeprefix(f"{arch}."): _shortest(metadata[k]) for k in metadata if k.startswith(f"{arch}.")}
    _check(arch, values)
    architecture, model_type = _ARCHITECTURES[arch]
    config = {"architectures": [architecture], "model_type": model_type, "hidden_act": "silu"}
    config |= {hf: values[key] for key, hf in _REQUIRED.items()}
    heads = config["num_attention_heads"]
    head_dim = (
        values.get("attention.key_length") or values.get("rope.dimension_count") or config["hidden_size"] // heads
    )
    config |= {
        "num_key_value_heads": values.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": values.get("vocab_size") or len(metadata["tokenizer.ggml.tokens"]),
        "rope_theta": values.get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(values, head_dim, freq_factors),
        "tie_word_embeddings": tied,
        "attention_bias": arch == "qwen2",
    }
    for hf, key in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        config[hf] = metadata.get(f"tokenizer.ggml.{key}_token_id")
    if arch == "gemma3":
        _add_gemma3(config, values)
    elif values.get("attention.sliding_window"):
        raise UnsupportedModelError(
            f"the GGUF sets {arch}.attention.sliding_window, which is supported for gemma3 only"
        )
    return config


def _shortest(value: Any) -> Any:
    """A float32 as the shortest decimal that names it: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def generation_config_from_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Beginning and end tokens; every id that ends a turn is an end token."""
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    ids = list(dict.fromkeys(i for i in ends if i is not None))
    return {"bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"), "eos_token_id": ids}


def _check(arch: str, values: dict[str, Any]) -> None:
    missing = sorted(k for k in _REQUIRED if k not in values)
    if missing:
        raise UnsupportedModelError(
            f"the GGUF lacks {', '.join(f'{arch}.{k}' for k in missing)}; it is incomplete or too old"
        )
    per_layer = sorted(k for k in values if isinstance(values[k], list))
    if per_layer:
        raise UnsupportedModelError(
            f"the GGUF varies {', '.join(f'{arch}.{k}' for k in per_layer)} by layer, not supported"
        )
    unknown = sorted(k for k in values if k not in _HANDLED and not (k.startswith("expert") and not values[k]))
    if unknown:
        raise UnsupportedModelError(
            f"the GGUF has metadata nobody handles: {', '.join(f'{arch}.{k}' for k in unknown)}"
        )
    key = values.get("attention.key_length")
    for other in ("attention.value_length", "rope.dimension_count"):
        if key and values.get(other, key) != key:
            raise UnsupportedModelError(
                f"the GGUF's {arch}.{other} is {values[other]}, its attention.key_length {key}; they must agree"
            )


def _rope_scaling(values: dict[str, Any], head_dim: int, freq_factors: np.ndarray | None) -> dict[str, Any] | None:
    kind = values.get("rope.scaling.type", "none")
    if freq_factors is not None:
        return _llama3_scaling(freq_factors, head_dim, values.get("rope.freq_base", 10000.0))
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": values["rope.scaling.factor"]}
    if kind == "yarn":
        optional = {"attention_factor": "attn_factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
        found = {hf: values[f"rope.scaling.{k}"] for hf, k in optional.items() if f"rope.scaling.{k}" in values}
        return {
            "rope_type": "yarn",
            "factor": values["rope.scaling.factor"],
            "original_max_position_embeddings": values["rope.scaling.original_context_length"],
        } | found
    raise UnsupportedModelError(f"the GGUF's rope.scaling.type is {kind!r}; supported: none, linear, yarn")


def _llama3_scaling(factors: np.ndarray, head_dim: int, theta: float) -> dict[str, Any]:
    """Llama 3's rule back from the divisors `[D/2]` that llama.cpp stores; the published thresholds are tried."""
    scaling = {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    turns = 8192 * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * np.pi)
    smooth = np.clip((turns - 1.0) / (4.0 - 1.0), 0, 1)
    expected = 1 / (smooth + (1 - smooth) / scaling["factor"])
    if expected.shape != factors.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise UnsupportedModelError(
            "the GGUF's rope_freqs.weight does not follow Llama 3's rule (1, 4, 8192); load the original weights"
        )
    return scaling


def _add_gemma3(config: dict[str, Any], values: dict[str, Any]) -> None:
    layers, dim = config["num_hidden_layers"], config["head_dim"]
    # The 27B model, alone of its family, scales queries by its width per head.
    scalar = config["hidden_size"] // config["num_attention_heads"] if layers == 62 else dim
    config |= {
        "hidden_activation": config.pop("hidden_act") and "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": values["attention.sliding_window"],
        "rope_theta": values.get("rope.freq_base", 1000000.0),
        "rope_local_base_freq": values.get("rope.freq_base_swa", 10000.0),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "layer_types": [
            "full_attention" if (i + 1) % _GEMMA3_PERIOD == 0 else "sliding_attention" for i in range(layers)
        ],
    }

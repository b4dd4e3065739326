"""EAGLE-3 heads in their two published shapes: a Llama layer, or a DeepSeek layer with a dense feed-forward."""

from collections.abc import Collection, Mapping
from typing import Any

from trillion_infer.config.drafter import Eagle3Spec
from trillion_infer.config.hf import HFConfig, read_rope
from trillion_infer.config.model import AttentionSpec, DenseSpec, LayerSpec, MixerSpec
from trillion_infer.core.errors import UnsupportedModelError
from trillion_infer.models.common import head_sizes, model_config
from trillion_infer.models.deepseek import read_latent

LLAMA_SHAPED = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
LATENT_SHAPED = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")
IGNORED_TENSORS = ("t2d",)
"""The boolean twin of `d2t`."""

_OF_THE_TARGET = """
    ep_size first_k_dense_replace moe_intermediate_size moe_layer_freq n_group n_routed_experts n_shared_experts
    norm_topk_prob num_experts_per_tok num_nextn_predict_layers routed_scaling_factor scoring_func topk_group
    topk_method mlp_bias pretraining_tp rope_interleaved
""".split()
"""Attributes that heads copy from their target and that a single dense layer does not have."""


def read_eagle3(values: Mapping[str, Any], names: Collection[str] | None = None) -> Eagle3Spec:
    """The head of a config.json. `names`: tensors of its checkpoint; None: as published heads have them.

    Raises UnsupportedModelError for another architecture and for attributes that are not handled.
    """
    config = HFConfig(values)
    known = values.get("architectures") or []
    if not any(name in (*LLAMA_SHAPED, *LATENT_SHAPED) for name in known):
        raise UnsupportedModelError(
            f"architecture {', '.join(known) or '(config.json names none)'} is no EAGLE-3 head; implemented: "
            f"{', '.join((*LLAMA_SHAPED, *LATENT_SHAPED))}."
        )
    latent = any(name in LATENT_SHAPED for name in known)
    config.expect("num_hidden_layers", 1, [1])
    config.expect("hidden_act", "silu", ["silu"])
    aux = _aux_layers(config)
    target_width = config.take("target_hidden_size", config.take("hidden_size"))
    vocab = config.take("vocab_size")
    drafted = config.take("draft_vocab_size", vocab)
    layer = LayerSpec(
        read_latent(config) if latent else _attention(config), DenseSpec(config.take("intermediate_size"))
    )
    config.ignore(*_OF_THE_TARGET)
    prefix = "midlayer." if not latent else "layers.0."
    own_embed, pruned = False, drafted < vocab
    if names is not None:
        prefix = "midlayer." if any(name.startswith("midlayer.") for name in names) else "layers.0."
        own_embed, pruned = "embed_tokens.weight" in names, pruned or "d2t" in names
    return Eagle3Spec(
        model_config(config, "eagle3", [layer], {}, vocab=drafted, tied=False),
        target_vocab=vocab,
        target_width=target_width,
        aux_layers=aux,
        prefix=prefix,
        own_embed=own_embed,
        pruned=pruned,
    )


def _attention(config: HFConfig) -> MixerSpec:
    heads, kv_heads, head_dim = head_sizes(config)
    bias = config.take("attention_bias", False)
    rope = read_rope(config, head_dim)
    return AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5, rope, qkv_bias=bias, out_bias=bias)


def _aux_layers(config: HFConfig) -> tuple[int, int, int] | None:
    if "eagle_config" not in config:
        return None
    eagle = config.nested("eagle_config")
    eagle.expect("use_aux_hidden_state", True, [True])
    ids = eagle.take("eagle_aux_hidden_state_layer_ids", None)
    eagle.finish()
    if ids is not None and (len(ids) != 3 or not all(isinstance(i, int) and i >= 0 for i in ids)):
        raise UnsupportedModelError(f"eagle_aux_hidden_state_layer_ids is {ids!r}; it must be three layer numbers.")
    return None if ids is None else tuple(ids)

"""Gemma 3 text: sliding and full attention layers with a rope each, sandwich norms of 1 + weight, GeGLU."""

import math
from collections.abc import Mapping
from typing import Any

from trillion_infer.config.hf import HFConfig, parse_scaling
from trillion_infer.config.model import AttentionSpec, DenseSpec, LayerSpec, Rope
from trillion_infer.models import Family
from trillion_infer.models.common import head_sizes, model_config
from trillion_infer.params.names import TensorNames

FULL, SLIDING = "full_attention", "sliding_attention"


def read(config: HFConfig, generation: Mapping[str, Any]) -> Family:
    heads, kv_heads, head_dim = head_sizes(config)
    config.expect("hidden_activation", "gelu_pytorch_tanh", ["gelu_pytorch_tanh"])
    config.expect("attention_bias", False, [False])
    config.expect("attn_logit_softcapping", None, [None])
    config.expect("use_bidirectional_attention", False, [False])
    ropes = _ropes(config, head_dim)
    scale = config.take("query_pre_attn_scalar", 256) ** -0.5
    window = config.take("sliding_window", 4096)
    ffn = DenseSpec(config.take("intermediate_size"), "gelu_tanh")

    def layer(kind: str) -> LayerSpec:
        reach = window if kind == SLIDING else None
        mixer = AttentionSpec(heads, kv_heads, head_dim, scale, ropes[kind], window=reach, qk_norm="rms")
        return LayerSpec(mixer, ffn, "sandwich")

    layers = [layer(kind) for kind in _kinds(config)]
    names = TensorNames(ffn_norm="pre_feedforward_layernorm.")
    return Family(
        model_config(
            config,
            "gemma3",
            layers,
            generation,
            norm_plus_one=True,
            embed_scale=math.sqrt(config.take("hidden_size")),
            logit_cap=config.take("final_logit_softcapping", None),
            tied=config.take("tie_word_embeddings", True),
        ),
        names,
    )


def _kinds(config: HFConfig) -> list[str]:
    count = config.take("num_hidden_layers")
    pattern = config.take("sliding_window_pattern", config.take("_sliding_window_pattern", 6))
    default = [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(count)]
    kinds = config.take("layer_types", default)
    for kind in kinds:
        HFConfig({"layer_types": kind}, config.where).expect("layer_types", kind, [FULL, SLIDING])
    return list(kinds)


def _ropes(config: HFConfig, dim: int) -> dict[str, Rope]:
    """One rope a layer kind: nested `rope_parameters` (transformers 5), or a global and a local theta before it."""
    max_len = config.take("max_position_embeddings")
    nested = config.take("rope_parameters", {})
    scaling = config.take("rope_scaling", {})
    old = {
        FULL: {**scaling, "rope_theta": config.take("rope_theta", 1e6)},
        SLIDING: {"rope_theta": config.take("rope_local_base_freq", 1e4)},
    }
    ropes = {}
    for kind in (FULL, SLIDING):
        values = dict(nested.get(kind) or old[kind])
        ropes[kind] = Rope(float(values.pop("rope_theta")), dim, parse_scaling(values, max_len, config.where))
    return ropes

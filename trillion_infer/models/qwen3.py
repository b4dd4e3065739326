"""Qwen3 dense: grouped-query attention with q and k normed per head, SwiGLU, pre-norm."""

from collections.abc import Mapping
from typing import Any

from trillion_infer.config.hf import HFConfig, read_rope
from trillion_infer.config.model import AttentionSpec, DenseSpec, LayerSpec
from trillion_infer.models import Family
from trillion_infer.models.common import head_sizes, model_config
from trillion_infer.params.names import TensorNames


def read_mixer(config: HFConfig) -> AttentionSpec:
    """Attention of Qwen3, dense or mixture. Layer types other than full attention are refused."""
    heads, kv_heads, head_dim = head_sizes(config)
    bias = config.take("attention_bias", False)
    config.expect("use_sliding_window", False, [False])
    config.ignore("sliding_window", "max_window_layers")
    kinds = config.take("layer_types", None)
    config.expect("layer_types", None, [None, ["full_attention"] * len(kinds or [])])
    return AttentionSpec(
        heads,
        kv_heads,
        head_dim,
        scale=head_dim**-0.5,
        rope=read_rope(config, head_dim, default_theta=1e6),
        qk_norm="rms",
        qkv_bias=bias,
        out_bias=bias,
    )


def read(config: HFConfig, generation: Mapping[str, Any]) -> Family:
    mixer = read_mixer(config)
    config.expect("hidden_act", "silu", ["silu"])
    layer = LayerSpec(mixer, DenseSpec(config.take("intermediate_size")))
    layers = [layer] * config.take("num_hidden_layers")
    return Family(model_config(config, "qwen3", layers, generation), TensorNames())

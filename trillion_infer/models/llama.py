"""Llama 2 and 3, SmolLM2, Mistral: grouped-query attention, SwiGLU, pre-norm."""

from collections.abc import Mapping
from typing import Any

from trillion_infer.config.hf import HFConfig, read_rope
from trillion_infer.config.model import AttentionSpec, DenseSpec, LayerSpec
from trillion_infer.models import Family
from trillion_infer.models.common import head_sizes, model_config
from trillion_infer.params.names import TensorNames


def read(config: HFConfig, generation: Mapping[str, Any]) -> Family:
    heads, kv_heads, head_dim = head_sizes(config)
    config.expect("hidden_act", "silu", ["silu"])
    config.expect("mlp_bias", False, [False])
    bias = config.take("attention_bias", False)
    mixer = AttentionSpec(
        heads,
        kv_heads,
        head_dim,
        scale=head_dim**-0.5,
        rope=read_rope(config, head_dim),
        window=config.take("sliding_window", None),
        qkv_bias=bias,
        out_bias=bias,
    )
    config.ignore("rope_interleaved")
    layer = LayerSpec(mixer, DenseSpec(config.take("intermediate_size")))
    layers = [layer] * config.take("num_hidden_layers")
    return Family(model_config(config, "llama", layers, generation), TensorNames())

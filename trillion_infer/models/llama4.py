"""Llama 4 Scout and Maverick (text): chunked attention with rope, full attention without, scores on expert input."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from trillion_infer.config.hf import HFConfig, read_rope
from trillion_infer.config.model import AttentionSpec, DenseSpec, LayerSpec, MoESpec, RouterSpec
from trillion_infer.models import Family
from trillion_infer.models.common import head_sizes, model_config
from trillion_infer.params.names import ExpertNames, TensorNames

NAMES = TensorNames(ffn="feed_forward.", experts=ExpertNames(layout="fused", router="router.", shared="shared_expert."))


def read(config: HFConfig, generation: Mapping[str, Any]) -> Family:
    if "text_config" in config:
        return _multimodal(config, generation)
    count = config.take("num_hidden_layers")
    uses_rope = config.take("no_rope_layers", [])
    step = config.take("no_rope_layer_interval", 4)
    uses_rope = [bool(u) for u in uses_rope] or [(i + 1) % step != 0 for i in range(count)]
    _check_kinds(config, uses_rope)
    moe_layers = config.take("moe_layers", None)
    interleave = config.take("interleave_moe_layer_step", 1)
    moe_layers = range(interleave - 1, count, interleave) if moe_layers is None else moe_layers
    rotary, plain = _mixers(config)
    moe = _experts(config)
    dense = DenseSpec(config.take("intermediate_size_mlp"))
    layers = [LayerSpec(rotary if uses_rope[i] else plain, moe if i in moe_layers else dense) for i in range(count)]
    config.ignore("for_llm_compressor", "cache_implementation")
    return Family(model_config(config, "llama4", layers, generation), NAMES)


def _multimodal(config: HFConfig, generation: Mapping[str, Any]) -> Family:
    text = config.nested("text_config")
    config.ignore("vision_config", "boi_token_index", "eoi_token_index", "image_token_index")
    config.finish()
    family = read(text, generation)
    names = family.names.within("language_model.")
    return dataclasses.replace(family, names=names, ignore=(r"vision_model\..*", r"multi_modal_projector\..*"))


def _check_kinds(config: HFConfig, uses_rope: list[bool]) -> None:
    """`layer_types`, where given, must say what `no_rope_layers` says."""
    expected = ["chunked_attention" if rope else "full_attention" for rope in uses_rope]
    config.expect("layer_types", expected, [expected])


def _mixers(config: HFConfig) -> tuple[AttentionSpec, AttentionSpec]:
    """The mixer of layers with rope and that of layers without."""
    heads, kv_heads, head_dim = head_sizes(config)
    bias = config.take("attention_bias", False)
    common = {"scale": head_dim**-0.5, "qkv_bias": bias, "out_bias": bias}
    growth = (config.take("attn_scale", 0.1), int(config.take("floor_scale", 8192)))
    tuned = config.take("attn_temperature_tuning", True)
    rotary = AttentionSpec(
        heads,
        kv_heads,
        head_dim,
        rope=read_rope(config, head_dim, default_theta=500000.0, interleaved=True),
        chunk=config.take("attention_chunk_size", None),
        qk_norm="l2" if config.take("use_qk_norm", True) else None,
        **common,
    )
    plain = AttentionSpec(heads, kv_heads, head_dim, rope=None, query_growth=growth if tuned else None, **common)
    return rotary, plain


def _experts(config: HFConfig) -> MoESpec:
    config.expect("hidden_act", "silu", ["silu"])
    width = config.take("intermediate_size")
    router = RouterSpec("sigmoid", on_input=True)
    return MoESpec(config.take("num_local_experts"), config.take("num_experts_per_tok", 1), width, router, width)

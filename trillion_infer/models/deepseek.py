"""DeepSeek V3 and R1, Kimi K2, K2-Thinking, K2.5 and 2.6 (text): latent attention, sigmoid-routed experts."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from trillion_infer.config.hf import HFConfig, read_rope, yarn_mscale
from trillion_infer.config.model import DenseSpec, LatentSpec, LayerSpec, MoESpec, RouterSpec
from trillion_infer.models import Family
from trillion_infer.models.common import model_config
from trillion_infer.params.names import TensorNames

VISION = (r"vision_tower\..*", r"mm_projector\..*", r"multi_modal_projector\..*", r"vision_model\..*")


def read(config: HFConfig, generation: Mapping[str, Any]) -> Family:
    if "text_config" in config:
        return _multimodal(config, generation)
    count = config.take("num_hidden_layers")
    mixer, ffn = read_latent(config), _experts(config)
    dense = DenseSpec(config.take("intermediate_size"))
    first, every = config.take("first_k_dense_replace", 0), config.take("moe_layer_freq", 1)
    layers = [LayerSpec(mixer, ffn if i >= first and i % every == 0 else dense) for i in range(count)]
    drafts = config.take("num_nextn_predict_layers", 0)
    ignore = tuple(rf"model\.layers\.{count + i}\..*" for i in range(drafts))
    ignore += (r".*\.rotary_emb\.inv_freq",)
    return Family(model_config(config, "deepseek", layers, generation), TensorNames(), ignore, mtp_layers=drafts)


def _multimodal(config: HFConfig, generation: Mapping[str, Any]) -> Family:
    """A Kimi K2.5 checkpoint: its text part; the vision tower is skipped."""
    text = config.nested("text_config")
    config.ignore("vision_config", "media_placeholder_token_id", "ignore_index", "use_unified_vision_chunk")
    config.ignore("video_placeholder", "image_token_id", "vt_hidden_size")
    config.finish()
    family = read(text, generation)
    names = family.names.within("language_model.")
    return dataclasses.replace(family, names=names, ignore=(*family.ignore, *VISION))


def read_latent(config: HFConfig) -> LatentSpec:
    """Multi-head latent attention as DeepSeek-shaped configs describe it."""
    config.expect("attention_bias", False, [False])
    heads = config.take("num_attention_heads")
    config.expect("num_key_value_heads", heads, [heads])
    nope, rope_dim = config.take("qk_nope_head_dim"), config.take("qk_rope_head_dim")
    config.ignore("head_dim", "qk_head_dim")
    stretch = {**config.take("rope_scaling", {}), **config.take("rope_parameters", {})}
    rope = read_rope(config, rope_dim, interleaved=config.take("rope_interleave", True))
    scale = (nope + rope_dim) ** -0.5
    if rope.scaling is not None and stretch.get("mscale_all_dim"):
        scale *= yarn_mscale(rope.scaling.factor, stretch["mscale_all_dim"]) ** 2
    return LatentSpec(
        heads,
        config.take("q_lora_rank", None),
        config.take("kv_lora_rank"),
        nope,
        rope_dim,
        config.take("v_head_dim"),
        scale,
        rope,
    )


def _experts(config: HFConfig) -> MoESpec:
    config.expect("hidden_act", "silu", ["silu"])
    config.expect("topk_method", "noaux_tc", ["noaux_tc"])
    score = config.expect("scoring_func", "sigmoid", ["sigmoid"])
    width = config.take("moe_intermediate_size")
    router = RouterSpec(
        score,
        selection_bias=True,
        groups=config.take("n_group", 1),
        top_groups=config.take("topk_group", 1),
        renormalise=config.take("norm_topk_prob", True),
        scale=config.take("routed_scaling_factor", 1.0),
    )
    shared = width * config.take("n_shared_experts", 0)
    return MoESpec(config.take("n_routed_experts"), config.take("num_experts_per_tok"), width, router, shared)

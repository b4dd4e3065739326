"""Every parameter of a decoder, for a mesh of given sizes."""

from collections.abc import Mapping

from sharding.rules import SERVE_RULES, shards
from trillion_infer.config.model import AttentionSpec, DenseSpec, LayerSpec, ModelConfig
from trillion_infer.config.stages import stage_plan
from trillion_infer.params.attention import attention_params
from trillion_infer.params.blocks import embedding_params, ffn_params, norm_params
from trillion_infer.params.latent import latent_params
from trillion_infer.params.moe import moe_params
from trillion_infer.params.names import TensorNames
from trillion_infer.params.tree import Declared, placed_rows

Sizes = Mapping[str, int]
"""Devices along each axis of the mesh."""


def decoder_params(config: ModelConfig, names: TensorNames, sizes: Sizes) -> Declared:
    """The tree of `layers.decoder.Decoder`. segments: by number, then by place in the period; stacks have rows as the
    pipeline's stages place them."""
    parts, plan = shards(SERVE_RULES, "vocab", sizes), stage_plan(config, sizes["stage"])
    segments, first = {}, 0
    for number, segment in enumerate(plan.segments):
        period, repeats = len(segment.period), sum(plan.counts[number])
        segments[str(number)] = {}
        for place, spec in enumerate(segment.period):
            layers = tuple(first + place + r * period for r in range(repeats))
            declared = layer_params(spec, config, layers, names, sizes)
            if plan.stages > 1:
                declared = placed_rows(declared, plan.rows(number), plan.stages * plan.slots(number))
            segments[str(number)][str(place)] = declared
        first += period * repeats
    return {
        "embed": embedding_params(config, names.embed, parts),
        "head": None if config.tied else embedding_params(config, names.head, parts),
        "norm": norm_params(names.final_norm, config.width),
        "segments": segments,
    }


def layer_params(
    spec: LayerSpec, config: ModelConfig, numbers: tuple[int, ...], names: TensorNames, sizes: Sizes
) -> Declared:
    """One kind of layer, stacked over the layers of these numbers."""
    prefixes = tuple(names.layer.format(n) for n in numbers)

    def norm(name: str) -> Declared:
        return norm_params(tuple(p + name for p in prefixes), config.width)

    mixer, ffn = (tuple(p + name for p in prefixes) for name in (names.mixer, names.ffn))
    sandwich = spec.residual == "sandwich"
    return {
        "mixer": attention_params(spec.mixer, config, mixer, sizes)
        if isinstance(spec.mixer, AttentionSpec)
        else latent_params(spec.mixer, config, mixer, sizes),
        "ffn": ffn_params(spec.ffn, config, ffn, shards(SERVE_RULES, "ffn", sizes))
        if isinstance(spec.ffn, DenseSpec)
        else moe_params(spec.ffn, config, ffn, names.experts, sizes),
        "mixer_norm": norm(names.mixer_norm),
        "ffn_norm": norm(names.ffn_norm),
        "mixer_post_norm": norm(names.mixer_post_norm) if sandwich else None,
        "ffn_post_norm": norm(names.ffn_post_norm) if sandwich else None,
    }

"""Parameters of mixtures of experts and their routers."""

from collections.abc import Mapping
from functools import partial

from sharding.heads import round_up
from sharding.rules import SERVE_RULES, shards
from trillion_infer.config.model import DenseSpec, ModelConfig, MoESpec
from trillion_infer.params.blocks import ffn_params
from trillion_infer.params.names import ExpertNames
from trillion_infer.params.tree import WHOLE, Declared, Part, stacked


def router_params(
    spec: MoESpec, config: ModelConfig, prefixes: tuple[str, ...], bias_name: str, shards: int
) -> Declared:
    """weight: `[E, M]`, its rows padded with zeros to a multiple of `shards`; biases `[E]`. float32."""
    experts, rule = spec.experts, spec.router
    own = partial(stacked, prefixes, dtype="float32")
    shape = (round_up(experts, shards), config.width)
    return {
        "weight": own(shape, ("router_rows", "embed"), {"weight": Part((slice(0, experts),))}),
        "bias": own((experts,), ("router",), {"bias": WHOLE}) if rule.bias else None,
        "selection_bias": own((experts,), ("router",), {bias_name: WHOLE}) if rule.selection_bias else None,
    }


def moe_params(
    spec: MoESpec, config: ModelConfig, prefixes: tuple[str, ...], names: ExpertNames, sizes: Mapping[str, int]
) -> Declared:
    """gate_up: `[E, 2, F, M]`, down: `[E, M, F]`; experts and F are padded to multiples of the shards."""
    parts_of = partial(shards, SERVE_RULES, sizes=sizes)
    experts, ffn = round_up(spec.experts, parts_of("experts")), round_up(spec.width, parts_of("expert_ffn"))
    width, real = config.width, slice(0, spec.experts)
    interleaved = names.layout == "interleaved"
    parts = _separate(spec) if names.layout == "separate" else _fused(spec, interleaved)
    up_axes, down_axes = ("experts", "gate_up", "expert_ffn"), ("experts", "embed", "expert_ffn")
    gate_up_bias = {"experts.gate_up_proj_bias": Part((real,), lambda b: _halves(b, interleaved))}
    down_bias = {"experts.down_proj_bias": Part((real,))}
    router = tuple(p + names.router for p in prefixes)
    shared = tuple(p + names.shared for p in prefixes)
    return {
        "gate_up": stacked(prefixes, (experts, 2, ffn, width), (*up_axes, "embed"), parts["gate_up"], in_axes=1),
        "down": stacked(prefixes, (experts, width, ffn), down_axes, parts["down"], in_axes=1),
        "gate_up_bias": stacked(prefixes, (experts, 2, ffn), up_axes, gate_up_bias) if spec.biases else None,
        "down_bias": stacked(prefixes, (experts, width), down_axes[:2], down_bias) if spec.biases else None,
        "router": router_params(spec, config, router, names.selection_bias, parts_of("router_rows")),
        "shared": ffn_params(DenseSpec(spec.shared_width), config, shared, parts_of("ffn"))
        if spec.shared_width
        else None,
    }


def _separate(spec: MoESpec) -> dict[str, dict[str, Part]]:
    real = slice(0, spec.width)
    gate_up, down = {}, {}
    for e in range(spec.experts):
        gate_up[f"experts.{e}.gate_proj.weight"] = Part((e, 0, real))
        gate_up[f"experts.{e}.up_proj.weight"] = Part((e, 1, real))
        down[f"experts.{e}.down_proj.weight"] = Part((e, slice(None), real))
    return {"gate_up": gate_up, "down": down}


def _fused(spec: MoESpec, interleaved: bool) -> dict[str, dict[str, Part]]:
    experts, real = slice(0, spec.experts), slice(0, spec.width)

    def gate_up(w):
        """`[E, M, 2F]` -> `[E, 2, F, M]`; packed weights have fewer rows than M."""
        if interleaved:
            return w.reshape(*w.shape[:2], spec.width, 2).transpose(0, 3, 2, 1)
        return w.reshape(*w.shape[:2], 2, spec.width).transpose(0, 2, 3, 1)

    return {
        "gate_up": {"experts.gate_up_proj": Part((experts, slice(None), real), gate_up)},
        "down": {"experts.down_proj": Part((experts, slice(None), real), lambda w: w.transpose(0, 2, 1))},
    }


def _halves(bias, interleaved: bool):
    """`[E, 2F]` -> `[E, 2, F]`"""
    if interleaved:
        return bias.reshape(bias.shape[0], -1, 2).transpose(0, 2, 1)
    return bias.reshape(bias.shape[0], 2, -1)

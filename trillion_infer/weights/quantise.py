"""Weight-only quantisation while loading: a plain checkpoint as if it held the packed items and scales of its weights.

Which parameters: those of products that take quantised weights (`ParamSpec.in_axes`). Tables over the vocabulary
(embedding, head) become int8 whatever the recipe; norms, biases, routers and the per-head projections of latent
attention stay as they are. An int4 weight whose rows a shard would cut inside a packed word becomes int8 instead.

A weight is rounded by its own rows as the checkpoint has them, so its values are the same on every mesh (but for those
int4 weights that become int8: rows of which a shard has no multiple of eight elements, as only tiny models have); where
a shard ends inside a group, the group's scale is stored several times.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from pallas_kernels.quantised_matmul.formats import QuantisedTensor
from trillion_infer.core.errors import ConfigError
from trillion_infer.weights.checkpoint import Checkpoint
from trillion_infer.weights.orbax import OrbaxCheckpoint
from trillion_infer.weights.plan import region_of
from trillion_infer.weights.quant_checkpoint import PACKED, SCALE, QuantisedCheckpoint
from trillion_infer.weights.quant_load import KeptQuantised, first_axes
from trillion_infer.weights.quantising_checkpoint import QuantisingCheckpoint, Rounding
from trillion_infer.weights.rounding import RECIPES, Recipe
from trillion_infer.weights.spec import ParamSpec, Source


@dataclass(frozen=True)
class _Split:
    """The two specs that stand for a parameter, where they lie, and how their sources are rounded."""

    packed: ParamSpec
    scale: ParamSpec
    packed_sharding: Sharding
    scale_sharding: Sharding
    recipe: Recipe
    group: int  # elements that share a stored scale
    roundings: tuple[Rounding, ...]


def quantise_specs(
    specs: Mapping[str, ParamSpec], shardings: Mapping[str, Sharding], checkpoint: Checkpoint, recipe: str
) -> KeptQuantised:
    """What to load in place of `specs`, from a view of the checkpoint that rounds as it reads.

    Raises ConfigError for an unknown recipe, and for a checkpoint that `check_quantisable` refuses.
    """
    check_quantisable(checkpoint, recipe)
    splits = _splits(specs, shardings, recipe)
    roundings: dict[str, Rounding] = {}
    out_specs, out_shardings, formats = {}, {}, {}
    for name, spec in specs.items():
        split = splits.get(name)
        if split is None:
            out_specs[name], out_shardings[name] = spec, shardings[name]
            continue
        out_specs[name + PACKED], out_shardings[name + PACKED] = split.packed, split.packed_sharding
        out_specs[name + SCALE], out_shardings[name + SCALE] = split.scale, split.scale_sharding
        formats[name] = split.recipe.format, split.group
        roundings.update({r.source.name: r for r in split.roundings})
    return KeptQuantised(out_specs, out_shardings, QuantisingCheckpoint(checkpoint, roundings), formats)


def abstract_quantised(
    specs: Mapping[str, ParamSpec], shardings: Mapping[str, Sharding], recipe: str
) -> dict[str, QuantisedTensor]:
    """Shapes and shardings of the parameters that `quantise_specs` quantises."""

    def leaf(spec: ParamSpec, sharding: Sharding) -> Any:
        return jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype), sharding=sharding)

    return {
        name: QuantisedTensor(
            leaf(s.packed, s.packed_sharding), leaf(s.scale, s.scale_sharding), s.recipe.format, s.group
        )
        for name, s in _splits(specs, shardings, recipe).items()
    }


def check_recipe(recipe: str) -> Recipe:
    """The recipe of a name; ConfigError that lists the names."""
    if recipe not in RECIPES:
        raise ConfigError(f"quantize is {recipe!r}; it must be one of {', '.join(RECIPES)}.")
    return RECIPES[recipe]


def check_quantisable(checkpoint: Checkpoint, recipe: str) -> None:
    """Raises ConfigError where the checkpoint's weights are quantised already, or in final layout."""
    if isinstance(checkpoint, QuantisedCheckpoint):
        raise ConfigError(
            f"quantize is {recipe!r}, but {checkpoint.path} holds {checkpoint.format.name} weights, which are used as "
            "they are. Leave quantize out, or give the checkpoint they were made from."
        )
    if isinstance(checkpoint, OrbaxCheckpoint):
        raise ConfigError(
            f"quantize is {recipe!r}, but {checkpoint.path} is in final layout. Leave quantize out, or convert the "
            f"original checkpoint with --quantize={recipe}."
        )


def _splits(specs: Mapping[str, ParamSpec], shardings: Mapping[str, Sharding], recipe: str) -> dict[str, _Split]:
    """Splits of every parameter that is quantised: those whose tensors no other parameter reads."""
    wanted = check_recipe(recipe)
    users = Counter(source.name for spec in specs.values() for source in spec.sources)
    found = {}
    for name, spec in specs.items():
        if spec.in_axes and all(users[source.name] == 1 for source in spec.sources):
            chosen = RECIPES["int8"] if spec.axes[0] == "vocab" else wanted
            found[name] = _split(spec, shardings[name], chosen) or _split(spec, shardings[name], RECIPES["int8"])
    return found


def _split(spec: ParamSpec, sharding: Sharding, recipe: Recipe) -> _Split | None:
    """None where rows cannot be packed by the recipe on this sharding."""
    outs = len(spec.shape) - spec.in_axes
    inner = math.prod(spec.shape[outs + 1 :])  # elements of a row for one place on the axis that may be split
    edges = [edge * inner for s in spec.sources for edge in region_of(s, spec.shape).box[outs][:2]]
    width, shard = spec.shape[outs] * inner, math.prod(sharding.shard_shape(spec.shape)[outs:])
    stored = unit = 0
    if recipe.group:
        unit = math.gcd(recipe.group, spec.shape[-1] if spec.in_axes > 1 else 0, *edges)
        stored = math.gcd(unit, shard, width)
        if stored % recipe.per_item:
            return None
        recipe = dataclasses.replace(recipe, group=unit)
    repeats = unit // stored if stored else 1
    roundings = tuple(Rounding(s, spec.in_axes, recipe, repeats) for s in spec.sources)

    def part(suffix: str, unit: int, dtype: np.dtype) -> ParamSpec:
        """unit: elements of a row that one item stands for; 0: the whole row."""
        sources = []
        for s in spec.sources:
            index = s.index[:outs]
            if unit and len(s.index) > outs:
                start, stop, _ = region_of(s, spec.shape).box[outs]
                index = (*index, slice(start * inner // unit, stop * inner // unit))
            sources.append(Source(s.name + suffix, index))
        tail, axes = ((width // unit,), spec.axes[: outs + 1]) if unit else ((), spec.axes[:outs])
        return ParamSpec((*spec.shape[:outs], *tail), dtype.name, axes, tuple(sources), spec.init)

    return _Split(
        part(PACKED, recipe.per_item, recipe.packed_dtype),
        part(SCALE, stored, recipe.scale_dtype),
        first_axes(sharding, outs + 1),
        first_axes(sharding, outs + bool(stored)),
        recipe,
        stored,
        roundings,
    )

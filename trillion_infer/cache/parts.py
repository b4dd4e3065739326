"""A block in parts: runs of consecutive layers, each stored by itself, so that computing may begin with the first."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from sharding.stages import balanced_cuts
from trillion_infer.cache.layout import PoolLayout
from trillion_infer.config.model import ModelConfig, cache_key

MAX_PARTS = 4
"""Each part more costs a call of the step and another object in every tier; four hide three quarters of the shorter of
reading and computing."""


@dataclass(frozen=True)
class LayerParts:
    """Where the parts begin and the last one ends.

    repeats: numbers of repeats of the model's segments, laid end to end. layers: for each cache group, numbers of its
    pool's layers. A group may have no layer in a part.
    """

    repeats: tuple[int, ...]
    layers: tuple[tuple[int, ...], ...]

    @property
    def count(self) -> int:
        return len(self.repeats) - 1

    def of(self, group: int) -> dict[int, tuple[int, int]]:
        """The parts that hold layers of a group: first layer and the one after the last, by number of the part."""
        return {part: run for part, run in enumerate(pairwise(self.layers[group])) if run[0] < run[1]}


def layer_parts(config: ModelConfig, layouts: Sequence[PoolLayout], most: int = MAX_PARTS) -> LayerParts:
    """At most `most` parts with about as many layers each, for the pools of the model's cache groups.

    The same for every mesh, except that what pipeline stages leave unused of a pool belongs to its last part.
    """
    periods = [segment.period for segment in config.segments for _ in range(segment.repeats)]
    cuts = balanced_cuts([len(period) for period in periods], min(most, len(periods)))
    layers = []
    for layout in layouts:
        seen = [0, *accumulate(sum(cache_key(layer.mixer) == layout.key for layer in period) for period in periods)]
        layers.append((*(seen[cut] for cut in cuts[:-1]), layout.layers))
    return LayerParts(cuts, tuple(layers))

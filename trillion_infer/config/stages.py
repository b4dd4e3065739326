"""Which layers a pipeline stage runs: a plan that is the same program on every stage, padded where stages differ."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from sharding.stages import balanced_cuts
from trillion_infer.config.model import (
    AttentionSpec,
    CacheKey,
    LayerSpec,
    ModelConfig,
    MoESpec,
    Segment,
    cache_key,
    segment_layers,
)


@dataclass(frozen=True)
class StagePlan:
    """Every stage runs the segments in order, of segment g `counts[g][stage]` repeats: contiguous layers of the model.

    Parameters of a segment are stacked `[stages * slots(g), …]`, of which a stage holds `slots(g)` rows and uses the
    first `counts[g][stage]`. A pool is stacked `[stages * pool_slots(key), …]` likewise. One stage is the model itself.
    """

    segments: tuple[Segment, ...]
    counts: tuple[tuple[int, ...], ...]

    @property
    def stages(self) -> int:
        return len(self.counts[0])

    def slots(self, segment: int) -> int:
        """Repeats that each stage has room for."""
        return max(self.counts[segment])

    def rows(self, segment: int) -> tuple[int, ...]:
        """The row of the stack that each repeat of the segment stands in."""
        slots = self.slots(segment)
        return tuple(stage * slots + i for stage, count in enumerate(self.counts[segment]) for i in range(count))

    def is_even(self, segment: int) -> bool:
        """Every stage runs equally many repeats."""
        return len(set(self.counts[segment])) == 1

    def pool_starts(self, segment: int, key: CacheKey) -> tuple[int, ...]:
        """The first layer, of a stage's part of a pool, that this segment uses; by stage."""
        earlier = [(_layers_of(self.segments[g], key), self.counts[g]) for g in range(segment)]
        return tuple(sum(layers * counts[stage] for layers, counts in earlier) for stage in range(self.stages))

    def pool_slots(self, key: CacheKey) -> int:
        """Layers that each stage's part of a pool has."""
        return max(self.pool_starts(len(self.segments), key))


def stage_plan(config: ModelConfig, stages: int) -> StagePlan:
    """The balanced plan: stages of near equal numbers of parameters, and little padding.

    Repeats of a period are not cut, so the periods are tried at every length. Raises ValueError where the model has
    fewer layers than stages.
    """
    if stages == 1:
        return StagePlan(config.segments, tuple((segment.repeats,) for segment in config.segments))
    if stages > len(config.layers):
        raise ValueError(
            f"mesh axis stage is {stages} and the model has {len(config.layers)} layers; a stage needs at least one, "
            f"so set stage to {len(config.layers)} or less."
        )
    return _best_plan(config.layers, config.width, stages)


def _best_plan(layers: tuple[LayerSpec, ...], width: int, stages: int) -> StagePlan:
    longest = max(len(segment.period) for segment in segment_layers(layers))
    options = dict.fromkeys(segment_layers(layers, cap) for cap in range(longest, 0, -1))
    plans = [_cut(segments, width, stages) for segments in options if _units(segments) >= stages]
    return min(plans, key=lambda plan: (_padded_size(plan, width), len(plan.segments)))


def _units(segments: tuple[Segment, ...]) -> int:
    return sum(segment.repeats for segment in segments)


def _cut(segments: tuple[Segment, ...], width: int, stages: int) -> StagePlan:
    owner = [g for g, segment in enumerate(segments) for _ in range(segment.repeats)]
    cuts = balanced_cuts([_period_size(segments[g], width) for g in owner], stages)
    parts = [owner[start:stop] for start, stop in pairwise(cuts)]
    return StagePlan(segments, tuple(tuple(part.count(g) for part in parts) for g in range(len(segments))))


def _padded_size(plan: StagePlan, width: int) -> int:
    """Parameters that a stage holds, unused rows counted."""
    return sum(plan.slots(g) * _period_size(segment, width) for g, segment in enumerate(plan.segments))


def _period_size(segment: Segment, width: int) -> int:
    return sum(layer_size(layer, width) for layer in segment.period)


def _layers_of(segment: Segment, key: CacheKey) -> int:
    return sum(cache_key(layer.mixer) == key for layer in segment.period)


def layer_size(layer: LayerSpec, width: int) -> int:
    """Parameters of a layer's matrices; `width` is the model's."""
    return sum(_mixer_sizes(layer, width)) + sum(_ffn_sizes(layer, width))


def _mixer_sizes(layer: LayerSpec, width: int) -> Iterator[int]:
    spec = layer.mixer
    if isinstance(spec, AttentionSpec):
        yield 2 * width * (spec.heads + spec.kv_heads) * spec.head_dim
        return
    if spec.q_rank is not None:
        yield width * spec.q_rank
    yield (spec.q_rank or width) * spec.heads * (spec.nope_dim + spec.rope_dim)
    yield width * (spec.kv_rank + spec.rope_dim)
    yield spec.kv_rank * spec.heads * (spec.nope_dim + spec.value_dim)
    yield width * spec.heads * spec.value_dim


def _ffn_sizes(layer: LayerSpec, width: int) -> Iterator[int]:
    spec = layer.ffn
    yield 3 * width * (spec.experts if isinstance(spec, MoESpec) else 1) * spec.width
    if isinstance(spec, MoESpec):
        yield 3 * width * spec.shared_width

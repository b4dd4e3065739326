"""Stage plans: every layer once, in order; little padding for the models that are served so."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trillion_infer.config.deployment import find_deployment
from trillion_infer.config.model import AttentionSpec, DenseSpec, LayerSpec, ModelConfig, segment_layers
from trillion_infer.config.stages import StagePlan, layer_size, stage_plan
from trillion_infer.models import read_family

MIXERS = [AttentionSpec(4, 2, 16, 1.0, None, window=window) for window in (None, 8)]
LAYERS = [LayerSpec(mixer, DenseSpec(width)) for mixer in MIXERS for width in (32, 64)]


def config_of(layers: list[LayerSpec]) -> ModelConfig:
    return ModelConfig("test", 128, 64, segment_layers(layers), 64, 1e-6, False)


def layers_by_stage(plan: StagePlan) -> list[list[LayerSpec]]:
    """What each stage runs."""
    segments = list(zip(plan.segments, plan.counts, strict=True))
    return [
        [layer for segment, counts in segments for _ in range(counts[stage]) for layer in segment.period]
        for stage in range(plan.stages)
    ]


lists = st.lists(st.sampled_from(LAYERS), min_size=1, max_size=6).flatmap(
    lambda period: st.integers(1, 4).map(lambda repeats: period * repeats)
)


@given(lists, st.integers(1, 6))
def test_the_stages_together_run_the_model(layers, stages):
    if stages > len(layers):
        with pytest.raises(ValueError, match="set stage to"):
            stage_plan(config_of(layers), stages)
        return
    by_stage = layers_by_stage(stage_plan(config_of(layers), stages))
    assert [layer for stage in by_stage for layer in stage] == layers
    assert all(by_stage)


@given(lists, st.integers(1, 6))
def test_rows_and_pool_places_do_not_overlap(layers, stages):
    plan = stage_plan(config_of(layers), min(stages, len(layers)))
    for number, segment in enumerate(plan.segments):
        rows = plan.rows(number)
        assert len(set(rows)) == len(rows) == sum(plan.counts[number])
        assert max(rows, default=0) < plan.stages * plan.slots(number)
        assert segment.repeats == len(rows)
    for key in config_of(layers).cache_keys:
        starts = [plan.pool_starts(number, key) for number in range(len(plan.segments) + 1)]
        assert all(list(by_stage) == sorted(by_stage) for by_stage in zip(*starts, strict=True))
        assert max(starts[-1]) == plan.pool_slots(key)


@pytest.mark.parametrize("name", ["kimi_k2_5_v5p_8", "deepseek_v3_v5p_8", "llama4_scout_v6e_8", "llama3_70b_v6e_8"])
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_real_models_are_balanced_with_little_padding(name, stages):
    """No stage has room for 20% more than its share, or one layer more where layers do not divide."""
    config = read_family(find_deployment(name).hf_config).config
    plan = stage_plan(config, stages)
    sizes = [layer_size(layer, config.width) for layer in config.layers]
    room = sum(
        plan.slots(number) * sum(layer_size(layer, config.width) for layer in segment.period)
        for number, segment in enumerate(plan.segments)
    )
    assert room <= sum(sizes) / stages * 1.2 + max(sizes)


def test_one_stage_is_the_model():
    config = config_of(LAYERS * 3)
    plan = stage_plan(config, 1)
    assert plan.segments == config.segments
    assert dataclasses.astuple(plan)[1] == tuple((segment.repeats,) for segment in config.segments)

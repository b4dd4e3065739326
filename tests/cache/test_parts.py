"""Parts of blocks: every layer of every pool in one of them, in the order of the step, the same on every mesh."""

from itertools import pairwise

import pytest

from tests.cache.test_layout import blueprint_of
from trillion_infer.cache.parts import MAX_PARTS, layer_parts
from trillion_infer.config.model import cache_key


@pytest.mark.parametrize("name", ["smollm2", "gemma3_text", "deepseek_v3", "gpt_oss"])
def test_a_part_holds_the_layers_that_its_repeats_run(name):
    blueprint = blueprint_of(name, "tensor=1", page_size=8, dtype="float32", max_model_len=64, max_running=2)
    config, parts = blueprint.family.config, layer_parts(blueprint.family.config, blueprint.layouts)
    assert 1 < parts.count <= MAX_PARTS
    periods = [segment.period for segment in config.segments for _ in range(segment.repeats)]
    assert (parts.repeats[0], parts.repeats[-1]) == (0, len(periods))
    for group, layout in enumerate(blueprint.layouts):
        done, of_group = 0, parts.of(group)
        for part, (start, stop) in enumerate(pairwise(parts.repeats)):
            run = [layer for period in periods[start:stop] for layer in period]
            count = sum(cache_key(layer.mixer) == layout.key for layer in run)
            assert of_group.get(part, (done, done)) == (done, done + count)
            done += count
        assert done == layout.layers


@pytest.mark.parametrize("mesh", ["tensor=2", "data=2,tensor=2", "stage=2"])
@pytest.mark.parametrize("name", ["smollm2", "deepseek_v3"])
def test_meshes_agree_wherever_their_pools_have_the_same_layers(name, mesh):
    one, many = (
        blueprint_of(name, each, page_size=8, dtype="float32", max_model_len=64, max_running=2)
        for each in ("tensor=1", mesh)
    )
    ours, theirs = (layer_parts(each.family.config, each.layouts) for each in (one, many))
    assert ours.repeats == theirs.repeats
    if [layout.layers for layout in one.layouts] == [layout.layers for layout in many.layouts]:
        assert ours == theirs
    assert [bounds[-1] for bounds in theirs.layers] == [layout.layers for layout in many.layouts]

"""Prefill and decode on disjoint meshes give the tokens of one mesh, and every page comes home."""

import random

import numpy as np
import pytest

from sharding.heads import HeadPlan
from tests.conftest import GOLDEN
from tests.engine.helpers import check_idle, greedy, tokens_of
from tests.engine.test_equalities import MIXED, SMALL, prompts_of
from trillion_infer import LLM, ConfigError, SamplingParams
from trillion_infer.transfer.pages import head_map

pytestmark = pytest.mark.matrix


@pytest.mark.parametrize("name", ["smollm2", "deepseek_v3", "gemma3_text", "llama4_scout"])
@pytest.mark.parametrize(
    "split", ["prefill=2,decode=2", "prefill=1,decode=4", "prefill=2x2,decode=1", "prefill=1,decode=2x1"]
)
def test_disaggregated_equals_colocated(make_llm, name, split):
    if name not in ("smollm2", "deepseek_v3") and split != "prefill=2,decode=2":
        pytest.skip("two models run on every split")
    one, apart = make_llm(name, **SMALL), make_llm(name, **SMALL, disaggregate=split)
    assert tokens_of(apart.generate(MIXED, greedy())) == tokens_of(one.generate(MIXED, greedy()))
    assert apart.stats()["handoffs"] > 0
    check_idle(apart)


def test_300_mixed_requests_with_shared_prefixes_aborts_and_seeds_p11(make_llm):
    """The KV a request decodes from is the KV of its own prompt, for hundreds of requests."""
    one, apart = make_llm("smollm2", **SMALL), make_llm("smollm2", **SMALL, disaggregate="prefill=1,decode=2")
    rng = random.Random(1)
    stems = prompts_of(5, [40, 24, 17])
    prompts = [rng.choice(stems)[: rng.randrange(1, 40)] + prompts_of(i, [rng.randrange(1, 20)])[0] for i in range(300)]
    params = [
        SamplingParams(temperature=rng.choice([0.0, 0.8]), seed=i, max_tokens=rng.randrange(1, 10), ignore_eos=True)
        for i in range(300)
    ]
    expected = tokens_of(one.generate(prompts, params))
    aborted = set(range(0, 300, 17))
    for i, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        apart.generator.add(str(i), prompt, each)
    steps = 0
    while apart.generator.has_work:
        apart.generator.step()
        steps += 1
        if steps % 3 == 0 and aborted:
            apart.generator.abort(str(aborted.pop()))
    outputs = [apart.generator.take(str(i)) for i in range(300)]
    kept = [i for i, output in enumerate(outputs) if output.outputs[0].finish_reason != "abort"]
    assert len(kept) > 250
    assert [outputs[i].outputs[0].token_ids for i in kept] == [expected[i] for i in kept]
    assert all(output.num_cached_tokens < len(output.prompt_token_ids) for output in outputs)
    assert apart.stats()["kv_pages_found"] > 0
    check_idle(apart)


def test_cold_and_warm_starts_on_sub_meshes_give_the_same_tokens_p19(make_llm, tmp_path):
    """Programs for a subset of the devices come back from the compilation cache as they went in."""
    answers = []
    for _ in range(2):
        llm = make_llm.fresh(
            "smollm2", **SMALL, max_running=2, disaggregate="prefill=1,decode=2", compile_cache=str(tmp_path)
        )
        answers.append(tokens_of(llm.generate(MIXED[:3], greedy())))
        llm.close()
    assert answers[0] == answers[1]
    assert any(tmp_path.iterdir())


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (8, 4), (4, 1), (64, 8)])
@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_head_maps_name_the_head_each_shard_holds_p12(heads, kv_heads, tensor):
    plan = HeadPlan(heads, kv_heads, tensor)
    marks = np.arange(1, kv_heads + 1)
    physical = plan.place_keys(marks)
    mapped = head_map(plan)
    assert [int(physical[place]) for place in mapped.first] == marks.tolist()
    assert [h + 1 for h in mapped.holds] == physical.tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"disaggregate": "prefill=8,decode=8"}, "needs 16 devices; there are 8"),
        ({"disaggregate": "prefill=2"}, "must name both roles"),
        ({"disaggregate": "prefill=2,decode=0"}, "asks for no device"),
        ({"disaggregate": "prefill=2,decode=2", "mesh": "tensor=2"}, "both given"),
    ],
)
def test_splits_that_cannot_be_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        LLM(GOLDEN / "tiny" / "smollm2", **options)

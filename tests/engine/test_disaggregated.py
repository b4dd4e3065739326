"""Prefill and decode on disjoint meshes give the tokens of one mesh, and every page comes home."""

import numpy as np
import pytest

from sharding.heads import HeadPlan
from tests.conftest import GOLDEN
from tests.engine.helpers import DRAFTING, HEAD, check_idle, equal_drafts, greedy, note_drafts, tokens_of
from tests.engine.test_equalities import MIXED, SMALL, prompts_of, tight_memory
from trillion_infer import LLM, ConfigError, SamplingParams
from trillion_infer.engine.handoff.build import HandoffOptions, make_worker_of
from trillion_infer.engine.pool_sides import pool_side
from trillion_infer.transfer.pages import PageMover, head_map

pytestmark = pytest.mark.matrix


ONE_EACH = {**SMALL, "disaggregate": "prefill=1,decode=1"}
SPLITS = ["prefill=2,decode=2", "prefill=1,decode=4", "prefill=2x1,decode=1", "prefill=1,decode=2x1"]


@pytest.mark.parametrize(("name", "split"), [(name, split) for split in SPLITS for name in ("smollm2", "deepseek_v3")])
def test_300_mixed_requests_with_shared_prefixes_and_aborts_p11(make_llm, mixed, name, split):
    """The KV a request decodes from is the KV of its own prompt, for hundreds of requests."""
    requests = mixed(name)
    apart = make_llm(name, **SMALL, disaggregate=split)
    for i, (prompt, each) in enumerate(zip(requests.prompts, requests.params, strict=True)):
        apart.generator.add(str(i), prompt, each)
    leave, steps = requests.aborting(lambda i: apart.generator.abort(str(i))), 0
    while apart.generator.has_work:
        apart.generator.step()
        leave(steps)
        steps += 1
    requests.check([apart.generator.take(str(i)) for i in range(len(requests.prompts))])
    stats = apart.stats()
    assert min(stats["handoffs"], stats["kv_pages_found"]) > 0
    check_idle(apart)


def test_preempted_where_it_decodes_equals_not(make_llm):
    """Answers that are taken to be short use up the pages; who is set back is prefilled again where it decodes."""
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=40, ignore_eos=True) for i in range(len(MIXED))]
    one = make_llm("smollm2", **SMALL)
    apart = make_llm.fresh("smollm2", **ONE_EACH, max_model_len=112, kv_memory=tight_memory(one, 26))
    apart.engine.decode[0].schedulers[0]._lengths._prior = 1
    assert tokens_of(apart.generate(MIXED, params)) == tokens_of(one.generate(MIXED, params))
    assert apart.engine.decode[0].schedulers[0].preemptions > 0
    check_idle(apart)
    apart.close()


@pytest.mark.parametrize("name", ["gemma3_text", "llama4_scout"])
def test_pages_of_windows_and_chunks_go_when_the_prompt_is_computed(make_llm, name):
    one, apart = make_llm(name, **SMALL), make_llm(name, **SMALL, disaggregate="prefill=2,decode=2")
    assert tokens_of(apart.generate(MIXED, greedy())) == tokens_of(one.generate(MIXED, greedy()))
    assert apart.stats()["handoffs"] > 0
    check_idle(apart)


def test_finished_blocks_travel_while_later_chunks_compute(make_llm):
    """Half of the prompt's pages are on their way before its last chunk has been sent."""
    one, apart = make_llm("smollm2", **SMALL), make_llm("smollm2", **ONE_EACH)
    prompt, ahead = prompts_of(71, [200])[0], []
    apart.generator.add("long", prompt, greedy(4))
    while apart.generator.has_work:
        apart.generator.step()
        ahead += [job.sent for job in apart.engine._jobs.values() if job.twin.num_computed < len(prompt)]
    output = apart.generator.take("long")
    assert max(ahead) == 16
    assert output.outputs[0].token_ids == tokens_of(one.generate([prompt], greedy(4)))[0]
    marks, lanes = output.metrics.handoff, {}
    for event in apart.engine.trace_events():
        if event["name"].startswith("long"):
            lanes.setdefault(event.get("cat"), []).append(event)
    page = sum(layout.page_bytes for layout in apart.blueprint.layouts)
    assert marks.bytes == 2 * 16 * page
    assert marks.exposed_s >= 0
    assert {"prefill", "transfer", "decode"} <= set(lanes)
    assert len(lanes["transfer"]) == 2
    check_idle(apart)


def test_a_busy_prefill_does_not_hold_up_tokens(make_llm):
    """With a long prompt on its way, no step of the engine waits for the prefill mesh while tokens can be made."""
    apart = make_llm("smollm2", **ONE_EACH)
    apart.generator.add("stream", prompts_of(72, [9])[0], greedy(120))
    while len(apart.generator.output("stream").outputs[0].token_ids) < 3:
        apart.generator.step()
    (prefill,) = apart.engine.prefill
    waited, step = [], prefill.step
    prefill.step = lambda waits=True: waited.append(waits) or step(waits)
    try:
        apart.generator.add("long", prompts_of(73, [200])[0], greedy(2))
        while not apart.generator.output("long").outputs[0].token_ids:
            apart.generator.step()
    finally:
        del prefill.step
    assert waited
    assert not any(waited)
    apart.generator.abort("stream")
    while apart.generator.has_work:
        apart.generator.step()
    check_idle(apart)


def test_prefixes_in_host_memory_are_found_by_the_prefill_side(make_llm):
    """And so are those that only the decode pool had: answers of an earlier turn."""
    one = make_llm("smollm2", **SMALL)
    apart = make_llm.fresh("smollm2", **ONE_EACH, max_model_len=112, kv_memory=tight_memory(one, 30), host_kv=1e8)
    apart.engine.prefill[0].tiering.promoter.chooses = False  # so small a model computes faster than memory is read
    prompts = prompts_of(74, [60] * 12)
    first = [apart.generate([prompt], greedy(20))[0] for prompt in prompts]
    turns = [output.prompt_token_ids + output.outputs[0].token_ids + [5] for output in first]
    again = [apart.generate([turn], greedy(4))[0] for turn in turns]
    assert tokens_of(again) == tokens_of(one.generate(turns, greedy(4)))
    assert [output.num_cached_tokens for output in again] == [72] * 12
    assert apart.stats()["kv_host.hit_tokens"] > 0
    assert apart.stats()["kv_layered_prefills"] > 0
    check_idle(apart)
    apart.close()


def test_models_draft_from_the_kv_that_prefill_computed(make_llm, monkeypatch):
    """Drafts are those of one engine: the drafter's KV of every prompt came along, prefixes found and all."""
    one, apart = (make_llm(DRAFTING, **HEAD, **split) for split in ({}, {"disaggregate": "prefill=1,decode=2"}))
    drafts = [note_drafts(engine, monkeypatch) for engine in (one.engine, apart.engine.decode[0])]
    for llm in (one, apart):
        llm.generate(MIXED[5:], greedy(12))
        llm.generate([[*prompt, 7] for prompt in MIXED[5:]], greedy(12))
    equal_drafts(*drafts)
    assert apart.stats()["handoffs"] == 6
    check_idle(apart)


def test_an_engine_of_several_meshes_takes_no_role_in_pools_of_processes(make_llm):
    with pytest.raises(ConfigError, match="a worker with a role has one mesh"):
        make_worker_of(make_llm("smollm2", **ONE_EACH), HandoffOptions("decode", "a key of sixteen bytes"))


@pytest.mark.parametrize(("name", "dtype"), [("smollm2", "int8"), ("deepseek_v3", "fp8")])
def test_kv_is_converted_on_its_way(make_llm, name, dtype):
    """Of a prompt the decode pool holds what its own format makes of the prefill pool's float32."""
    apart = make_llm.fresh(name, **ONE_EACH, kv_dtype=dtype, prefill_options="kv_dtype=float32")
    prompt, (prefill,), (decode,) = prompts_of(75, [50])[0], apart.engine.prefill, apart.engine.decode
    apart.generate([prompt], greedy(2))
    caches = [engine.schedulers[0].cache for engine in (prefill, decode)]
    names, side = [cache.names_of(prompt, "") for cache in caches], pool_side(apart.blueprint)
    count = len(names[0])
    for group, pool in enumerate(decode.pools):
        source, target = (
            [cache.groups[group].index.find(name).page for name in own]
            for cache, own in zip(caches, names, strict=True)
        )
        expected = apart.engine.movers[0][0].take(group, prefill.pools[group], source)
        found = PageMover(side, side).take(group, pool, target)
        np.testing.assert_array_equal(np.asarray(found)[:, :count], np.asarray(expected)[:, :count])
        assert float(np.abs(np.asarray(found).astype(np.float32)).max()) > 0
    page = sum(layout.page_bytes for layout in apart.blueprint.layouts)
    assert apart.stats()["kv_bytes_moved"] == 16 * page
    check_idle(apart)
    apart.close()


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
        ({"prefill_options": "max_running=2"}, "give disaggregate too"),
        ({"disaggregate": "prefill=1,decode=1", "prefill_options": "page_size=8"}, "may differ from decode engines in"),
        ({"disaggregate": "prefill=1,decode=1", "prefill_options": "max_running=few"}, "which is no number"),
    ],
)
def test_splits_that_cannot_be_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        LLM(GOLDEN / "tiny" / "smollm2", **options)

"""A request computes its first layers while the last ones of its prefix are still being read."""

import threading
import time

import jax
import pytest

from tests.engine.helpers import check_idle, greedy, tokens_of
from tests.engine.test_tiers import Conversations, prompts_of
from trillion_infer.cache.tiers.base import group_of, unit_of
from trillion_infer.engine import promoter as promoter_module


def part_of(unit: int) -> int:
    return unit - unit_of(group_of(unit), 0)


class Rig:
    """An LLM whose sessions all lie in host memory; reading all but the first part of blocks waits for `gate`."""

    def __init__(self, talk: Conversations):
        self.talk, self.llm = talk, talk.llm(host_kv=1e9, precompile=True)
        self.engine, self.generator = self.llm.engine, self.llm.generator
        self.engine.wait_for_programs()
        talk.check_each(self.llm)
        self.tier = self.engine.tiering.stack.tiers[0]
        self.gate, self._number = threading.Event(), 0
        stack = self.engine.tiering.stack
        read = stack.read

        def gated(keys, found):
            if part_of(keys[0][0]) > 0:
                self.gate.wait(30)
            return read(keys, found)

        stack.read = gated

    def reset(self) -> None:
        """No session is on the device and the gate is closed."""
        self.open()
        self.engine.tiering.save_cached(self.engine.all_pools)
        for scheduler in self.engine.schedulers:
            scheduler.cache.clear()
        self.gate.clear()

    def open(self) -> None:
        """Lets all be read; returns when what nobody wants any more has been."""
        self.gate.set()
        while self.engine.tiering.promoter._fetcher.is_stuck:
            time.sleep(0.01)

    def stats(self, *names: str) -> list[float]:
        stats = self.llm.stats()
        return [stats[f"kv_{name}"] for name in names]

    def begin(self, session: int, **options) -> str:
        """A session's request, sent as far as the first part of its layers."""
        self._number += 1
        request_id, before = f"{session}-{self._number}", self.engine.schedulers[0].num_layered
        self.generator.add(request_id, self.talk.prompt(session), greedy(6), **options)
        while self.engine.schedulers[0].num_layered == before:  # the gate is closed
            self.generator.step()
        for _ in range(3):
            self.generator.step()
        return request_id

    def finish(self, request_id: str, session: int) -> int:
        """Runs a request to its end, compares its answer; tokens found."""
        while not self.generator.output(request_id).finished:
            self.generator.step()
        output = self.generator.take(request_id)
        assert output.outputs[0].token_ids == self.talk._answer(session, 0)
        check_idle(self.llm)
        return output.num_cached_tokens

    def names(self, session: int) -> list[bytes]:
        """Of the blocks of a session's prompt."""
        return self.engine.block_names(self.talk.prompt(session), "")

    def whole(self, session: int) -> int:
        return (len(self.talk.prompt(session)) - 1) // 8 * 8


@pytest.fixture(scope="module")
def shared(make_llm, no_compile_cache, tmp_path_factory):
    rig = Rig(Conversations(make_llm, "smollm2", tmp_path_factory.mktemp("bundles")))
    yield rig
    rig.llm.close()


@pytest.fixture
def rig(shared):
    shared.reset()
    yield shared
    shared.gate.set()


def test_computing_begins_before_the_last_layers_have_come_and_others_go_on(rig):
    before = rig.stats("layered_prefills", "layered_ahead", "layered_dropped")
    rig.generator.add("other", prompts_of(77, [9])[0], greedy(30))
    for _ in range(4):
        rig.generator.step()
    late = rig.begin(0)
    known = len(rig.generator.output("other").outputs[0].token_ids)
    for _ in range(10):
        rig.generator.step()
    assert len(rig.generator.output("other").outputs[0].token_ids) >= known + 8
    assert not rig.generator.output(late).outputs[0].token_ids
    assert rig.stats("layered_ahead") == [before[1] + 1], "its first layers were not sent before the others came"
    rig.gate.set()
    while not rig.generator.output("other").finished:
        rig.generator.step()
    rig.generator.take("other")
    assert rig.finish(late, 0) == rig.whole(0)
    assert rig.stats("layered_prefills", "layered_dropped") == [before[0] + 1, before[2]]


def test_nothing_is_compiled_for_it(rig):
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    before, (layered,) = rig.llm.stats()["compilations"], rig.stats("layered_prefills")
    rig.gate.set()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for session in range(4, 8):
            rig.talk.check(rig.llm, [(session, 0)])
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert rig.stats("layered_prefills") == [layered + 4]
    assert rig.llm.stats()["compilations"] == before
    assert compiled == []


@pytest.mark.parametrize("damage", ["changed", "gone"])
def test_a_later_part_that_is_not_intact_costs_only_the_cache(rig, damage):
    session, (dropped, failures) = 8 if damage == "changed" else 9, rig.stats("layered_dropped", "host.digest_failures")
    request_id = rig.begin(session)
    names = set(rig.names(session))
    for key in [key for key in rig.tier._blocks if key[1] in names and part_of(key[0]) == 2]:
        block = rig.tier._blocks[key]
        if damage == "gone":
            rig.tier.discard([key])
        else:
            object.__setattr__(block, "data", bytes([block.data[0] ^ 1]) + block.data[1:])
    rig.gate.set()
    assert rig.finish(request_id, session) == 0
    assert rig.stats("layered_dropped") == [dropped + 1]
    assert (rig.stats("host.digest_failures")[0] > failures) == (damage == "changed")


def test_an_abort_between_two_parts_leaves_nothing(rig):
    request_id = rig.begin(10)
    rig.generator.abort(request_id)
    rig.generator.take(request_id)
    check_idle(rig.llm)
    assert not rig.engine.tiering.promoter._waiting
    rig.open()
    assert rig.talk.check(rig.llm, [(10, 0)]) == rig.whole(10)


def test_a_part_that_does_not_come_in_time_is_computed(rig, monkeypatch):
    monkeypatch.setattr(promoter_module, "PATIENCE_SECONDS", 0.5)
    late, dropped = rig.stats("late_promotions", "layered_dropped")
    assert rig.finish(rig.begin(11), 11) == 0
    assert rig.stats("late_promotions", "layered_dropped") == [late + 1, dropped + 1]


def test_blocks_that_are_deleted_between_two_parts_are_computed(rig):
    request_id = rig.begin(12)
    rig.gate.set()  # deleting waits for what is being stored, not for what is read
    rig.engine.discard(rig.names(12))
    assert rig.finish(request_id, 12) == 0


def test_pages_that_other_requests_need_are_given_up(rig, monkeypatch):
    """Requests of a higher rank preempt one whose prefix is on its way, which starts again."""
    monkeypatch.setattr(rig.engine.schedulers[0]._lengths, "_prior", 1)
    (dropped,), request_id = rig.stats("layered_dropped"), rig.begin(13)
    others = [str(number) for number in range(3)]
    for other in others:
        rig.generator.add(other, prompts_of(78 + int(other), [60])[0], greedy(50), priority=-1)
    while rig.engine.schedulers[0].num_layered:
        rig.generator.step()
    rig.gate.set()
    while not all(rig.generator.output(other).finished for other in others):
        rig.generator.step()
    for other in others:
        rig.generator.take(other)
    rig.finish(request_id, 13)
    assert rig.stats("layered_dropped") == [dropped + 1]


def test_whole_steps_and_steps_by_layers_may_have_the_same_size(make_llm):
    """An engine of one row has both for one request and 64 tokens."""
    prompts = [[(place * 7 + number) % 120 + 3 for place in range(60)] for number in range(8)]
    expected = tokens_of(make_llm("smollm2", page_size=8).generate(prompts, greedy(4)))
    llm = make_llm.fresh("smollm2", page_size=8, max_running=1, kv_memory=2**20, host_kv=1e7)
    llm.engine.tiering.promoter.chooses = False
    for _ in range(2):  # one by one: those that wait may have all their layers before their turn
        assert tokens_of([llm.generate(prompt, greedy(4))[0] for prompt in prompts]) == expected
    assert llm.stats()["kv_layered_prefills"] == len(prompts)
    check_idle(llm)
    llm.close()

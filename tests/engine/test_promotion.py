"""Stored prefixes come back while their requests wait, in any tier and under any traffic, and never a wrong one."""

import random
import threading
import time
import uuid

import pytest

from tests.engine.fake_tiering import BLOCK_BYTES, MODEL, PARTS, TieredEngine
from tests.schedule.fake_device import true_output
from trillion_infer.cache.tiers.disk import DiskTier
from trillion_infer.cache.tiers.host import HostTier
from trillion_infer.cache.tiers.objects import ObjectTier
from trillion_infer.config.cache import CacheGroup
from trillion_infer.config.tiers import ObjectStore
from trillion_infer.engine import promoter as promoter_module

FULL = [CacheGroup("full", None, 40)]
MIXED = [CacheGroup("full", None, 40), CacheGroup("window", 8, 24), CacheGroup("chunk", None, 24, chunk=12)]
SESSIONS, LENGTH = 12, 60


def host(capacity=10**6) -> HostTier:
    return HostTier(MODEL, capacity)


def prompts(count=SESSIONS, length=LENGTH, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(1, 11) for _ in range(length)] for _ in range(count)]


class SlowTier(HostTier):
    """Host memory that takes its time, or waits for a gate."""

    is_instant = False

    def __init__(self, seconds=0.0, gate=None):
        super().__init__(MODEL, 10**6)
        self.seconds, self.gate, self.is_lossy = seconds, gate, False

    def get(self, key):
        if self.gate is not None:
            self.gate.wait(20)
        time.sleep(self.seconds)
        return None if self.is_lossy else super().get(key)


@pytest.fixture(params=["host", "disk", "host+disk", "objects", "host+objects"])
def tiers(request, tmp_path):
    made = []
    if "host" in request.param:
        made.append(host(60 * BLOCK_BYTES if "+" in request.param else 10**6))
    if "disk" in request.param:
        made.append(DiskTier(tmp_path, MODEL, 10**7))
    if "objects" in request.param:
        made.append(ObjectTier(ObjectStore(f"memory://{uuid.uuid4().hex}", 0), MODEL, list_seconds=0))
    return made


@pytest.mark.parametrize("by_layers", [False, True], ids=["whole", "by layers"])
@pytest.mark.parametrize("groups", [FULL, MIXED], ids=["full", "mixed"])
def test_every_session_comes_back_whole(tiers, groups, by_layers):
    engine = TieredEngine(tiers, groups, by_layers)
    for prompt in prompts():
        assert engine.answer(prompt) == 0
    for prompt in prompts():
        assert engine.answer(prompt) == (LENGTH - 1) // 4 * 4
    engine.check_idle()
    stats = engine.tiering.stats()
    assert sum(stats[f"kv_{tier.name}.hit_tokens"] for tier in tiers) > SESSIONS * LENGTH // 2
    assert (stats["kv_layered_prefills"] > SESSIONS // 2) == by_layers
    assert stats["kv_layered_dropped"] == 0
    engine.close()


@pytest.mark.parametrize("by_layers", [False, True], ids=["whole", "by layers"])
@pytest.mark.parametrize("groups", [FULL, MIXED], ids=["full", "mixed"])
@pytest.mark.parametrize("seed", range(2))
def test_random_traffic_with_aborts_is_answered_right(tiers, groups, seed, by_layers):
    rng, engine = random.Random(seed), TieredEngine(tiers, groups, by_layers)
    sessions, live = prompts(seed=seed), []
    for _ in range(60):
        for _ in range(rng.choice([0, 1, 1, 3])):
            live.append(engine.add(rng.choice(sessions)[: rng.randrange(5, LENGTH)], rng.randrange(1, 9)))
        if live and rng.random() < 0.1:
            engine.abort(live.pop(rng.randrange(len(live))))
        if engine.scheduler.has_work or engine.in_flight:
            engine.step()
    engine.run()
    for request in live:
        assert request.output_ids == true_output(request)
    engine.check_idle()
    engine.close()


def test_others_run_while_a_prefix_is_on_its_way():
    """A read that takes for ever holds up nobody but its own request."""
    gate = threading.Event()
    engine = TieredEngine([SlowTier(gate=gate)])
    for prompt in prompts():
        engine.answer(prompt)
    first = engine.add(prompts()[0])
    other = engine.add(prompts(1, 12, seed=9)[0], 8)
    for _ in range(40):
        engine.step()
    assert other.status.is_finished
    assert not first.output_ids
    gate.set()
    engine.run()
    assert first.output_ids == true_output(first)
    assert first.num_cached_tokens > 0
    engine.close()


def test_a_prefix_that_does_not_come_in_time_is_computed(monkeypatch):
    monkeypatch.setattr(promoter_module, "PATIENCE_SECONDS", 0.05)
    gate = threading.Event()
    engine = TieredEngine([SlowTier(gate=gate)])
    for prompt in prompts():
        engine.answer(prompt)
    assert engine.answer(prompts()[0]) == 0
    assert engine.tiering.stats()["kv_late_promotions"] == 1
    begun = time.monotonic()
    assert engine.answer(prompts()[1]) == 0
    assert time.monotonic() - begun < 5, "a tier that hangs is not asked again"
    gate.set()
    engine.check_idle()
    engine.close()


def test_a_hit_that_is_slower_than_computing_is_computed():
    engine = TieredEngine([SlowTier(seconds=0.01)])
    for prompt in prompts():
        engine.answer(prompt)
    engine.tiering.promoter.record_prefill(1000, 1.0)
    assert engine.answer(prompts()[0]) > 0, "nothing is known of the tier yet"
    engine.tiering.promoter.record_prefill(100_000, 0.01)
    for _ in range(30):
        engine.tiering.promoter.record_prefill(100_000, 0.01)
    assert engine.answer(prompts()[1]) == 0
    assert engine.tiering.stats()["kv_slower_tokens"] > 0
    engine.tiering.promoter._slow_until = {"host": time.monotonic() - 1}
    assert engine.answer(prompts()[2]) == 56, "its time is over: it is tried once more, and measured"
    assert engine.answer(prompts()[3]) == 0
    engine.check_idle()
    engine.close()


def test_blocks_that_are_lost_on_the_way_are_computed():
    tier = SlowTier()
    engine = TieredEngine([tier])
    for prompt in prompts():
        engine.answer(prompt)
    tier.is_lossy = True
    assert engine.answer(prompts()[0]) == 0
    engine.check_idle()
    engine.close()


def test_evicted_blocks_leave_in_whole_calls():
    """A call that must read one page reads those that would be next, too."""
    engine = TieredEngine([host()])
    calls = []
    copy = engine.tiering._copier.read
    engine.tiering._copier.read = lambda pool, group, pages: calls.append(len(pages)) or copy(pool, group, pages)
    for prompt in prompts(30):
        engine.answer(prompt)
    assert sum(calls) / len(calls) > 12, calls
    stats = engine.tiering.stats()
    assert stats["kv_host.stored"] == PARTS * sum(calls), "no block is stored twice"
    engine.close()


def test_two_engines_share_a_store_as_soon_as_blocks_are_computed():
    url = f"memory://{uuid.uuid4().hex}"
    one, two = (TieredEngine([ObjectTier(ObjectStore(url, 0), MODEL, list_seconds=0)]) for _ in range(2))
    for prompt in prompts(4):
        one.answer(prompt, 8)
    one.tiering._save_published(one.pools, 1)
    one.tiering.stack.flush()
    assert [two.answer(prompt) for prompt in prompts(4)] == [56] * 4
    for engine in (one, two):
        engine.check_idle()
        engine.close()


def test_tenants_share_nothing_and_are_deleted_everywhere(tiers):
    engine = TieredEngine(tiers)
    for salt in ("a/x", "b", ""):
        for prompt in prompts(6):
            assert engine.answer(prompt, cache_salt=salt) == 0, "another tenant's prefix was found"
    for salt in ("a/x", "b", ""):
        assert engine.answer(prompts(6)[0], cache_salt=salt) == 56
    tag = engine.scheduler.cache.tag("a")
    engine.tiering.save_evicted(engine.pools)
    engine.scheduler.cache.forget(tag)
    engine.tiering.delete_tenant(tag)
    assert engine.answer(prompts(6)[0], cache_salt="a/x") == 0
    assert engine.answer(prompts(6)[0], cache_salt="b") == 56
    engine.check_idle()
    engine.close()

"""The engine's loop with tiers around it, on a scripted model: no array is computed, every step is real."""

import pytest

from tests.engine.fake_tiering import MODEL, PAGE, FakeCopier
from trillion_infer import SamplingParams
from trillion_infer.cache.tiers.host import HostTier
from trillion_infer.cache.tiers.stack import TierStack
from trillion_infer.engine.state import DeviceState
from trillion_infer.engine.tiering import KVTiering
from trillion_infer.testing.scripted import scripted_generator

PAGES = 24


@pytest.fixture(params=[False, True], ids=["in step", "run ahead"])
def generator(request):
    made = scripted_generator([5], None, num_pages=PAGES, page_size=PAGE, max_model_len=80, run_ahead=request.param)
    engine = made.engine
    state = engine._state
    pool = [[0] * PAGE for _ in range(PAGES)]
    engine._state = DeviceState((pool,), (None,), state.sampler)  # pyright: ignore
    engine.tiering = KVTiering(TierStack([HostTier(MODEL, 10**6)]), engine.schedulers, FakeCopier())
    engine.tiering.promoter.chooses = False  # a scripted model computes faster than any memory
    yield made
    assert not engine.has_work
    engine.check_integrity()
    engine.tiering.close(engine.pools)


def answer(generator, number, prompts, **options) -> list[int]:
    """Runs prompts together; tokens found of each."""
    ids = [f"{number}-{place}" for place in range(len(prompts))]
    for request_id, prompt in zip(ids, prompts, strict=True):
        generator.add(request_id, prompt, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), **options)
    while any(not generator.output(request_id).finished for request_id in ids):
        generator.step()
    return [generator.take(request_id).num_cached_tokens for request_id in ids]


def prompt(number: int) -> list[int]:
    return [number + 1] * 40


def test_prefixes_come_back_from_host_memory(generator):
    assert [answer(generator, n, [prompt(n)]) for n in range(6)] == [[0]] * 6
    assert [answer(generator, 10 + n, [prompt(n)]) for n in range(6)] == [[36]] * 6
    stats = generator.engine.stats()
    assert stats["kv_host.hit_tokens"] > 100
    assert stats["kv_device.hit_tokens"] + stats["kv_host.hit_tokens"] == stats["prefix_hit_tokens"]
    assert stats["kv_host.bytes"] <= stats["kv_demoted_bytes"]


def test_requests_together_find_their_prefixes(generator):
    for n in range(6):
        answer(generator, n, [prompt(n)])
    found = answer(generator, 10, [prompt(n) for n in range(4)])
    assert sum(found) > 36
    assert all(hit in range(0, 40, PAGE) for hit in found)


def test_a_pinned_session_never_leaves_and_an_idle_one_does(generator):
    answer(generator, 0, [prompt(0)], session_id="kept")
    for n in range(1, 6):
        answer(generator, n, [prompt(n)])
    assert answer(generator, 10, [prompt(0)]) == [36]
    assert generator.engine.stats()["kv_host.hit_tokens"] == 0
    generator.sessions._keep_alive = generator.sessions._next_expiry = 0
    generator.sessions.tick()
    for n in range(6, 10):
        answer(generator, n, [prompt(n)])
    assert answer(generator, 11, [prompt(0)]) == [36]
    assert generator.engine.stats()["kv_host.hit_tokens"] > 0


def test_a_deleted_session_and_a_deleted_tenant_leave_nothing(generator):
    answer(generator, 0, [prompt(0)], session_id="gone")
    answer(generator, 1, [prompt(0)], cache_salt="tenant/")
    for n in range(1, 6):
        answer(generator, 10 + n, [prompt(n)])
    generator.sessions.delete("gone")
    generator.sessions.delete_tenant("tenant")
    assert answer(generator, 20, [prompt(0)]) == [0]
    assert answer(generator, 21, [prompt(0)], cache_salt="tenant/") == [0]
    assert answer(generator, 22, [prompt(5)]) == [36]


def test_an_aborted_request_leaves_nothing_on_its_way(generator):
    for n in range(6):
        answer(generator, n, [prompt(n)])
    generator.add("x", prompt(0), SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    generator.step()
    generator.abort("x")
    generator.take("x")
    while generator.has_work:
        generator.step()
    promoter = generator.engine.tiering.promoter
    assert not promoter._waiting
    assert not promoter._pinned

"""Workers that hand prompts to each other give the tokens of one engine, and every page comes home."""

import random
import time

import pytest

from tests.engine.helpers import greedy, tokens_of
from tests.engine.test_equalities import MIXED, SMALL, prompts_of
from trillion_infer import SamplingParams
from trillion_infer.engine.handoff.build import HandoffOptions, make_worker
from trillion_infer.engine.handoff.worker import HandoffEngine
from trillion_infer.generation.generator import Generator
from trillion_infer.transfer.handoff.limits import HandoffLimits
from trillion_infer.transfer.transports import make_transport
from trillion_infer.transfer.transports.base import TransferError
from trillion_infer.transfer.transports.memory import MemoryTransport

pytestmark = pytest.mark.matrix

KEY = "a key that all workers of a test share"
SPACE: dict = {}


class Pools:
    """Workers of one process, stepped in turn."""

    def __init__(self, workers: dict[str, tuple[HandoffEngine, Generator]]):
        self.workers = workers

    def engine(self, name: str) -> HandoffEngine:
        return self.workers[name][0]

    def step(self, *silent: str) -> None:
        for name, (_, generator) in self.workers.items():
            if name not in silent:
                generator.step()

    def run(self, prompts, params, name: str = "decode", each=lambda step: None, limit_s: float = 120.0):
        """Outputs of a worker; `each(step)` is called between steps."""
        generator = self.workers[name][1]
        params = params if isinstance(params, list) else [params] * len(prompts)
        for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            generator.add(str(i), prompt, one)
        step, end = 0, time.monotonic() + limit_s
        while not all(generator.output(str(i)).finished for i in range(len(prompts))):
            self.step()
            each(step)
            step += 1
            assert time.monotonic() < end, self.engine(name).stats()
        return [generator.take(str(i)) for i in range(len(prompts))]

    def count(self, name: str, *figures: str) -> tuple[float, ...]:
        """Figures of a worker, 0 where it has none."""
        stats = self.engine(name).stats()
        return tuple(stats.get(figure, 0) for figure in figures)

    def mend(self) -> None:
        for name in self.workers:
            transport = self.engine(name).transport
            if isinstance(transport, MemoryTransport):
                transport.fault = lambda: None

    def close(self) -> None:
        for name in self.workers:
            self.engine(name).close()

    def settle(self) -> None:
        """Acknowledgements arrive; then nothing may be left."""
        end = time.monotonic() + 10
        while any(self.engine(name).has_work for name in self.workers) and time.monotonic() < end:
            self.step()
        for name in self.workers:
            engine = self.engine(name)
            engine.check_integrity()
            assert engine.stats()["handoff.held"] == engine.stats()["handoff.waiting"] == 0
            for group in engine.engine.schedulers[0].cache.groups:
                assert group.pool.num_leased == 0, name


@pytest.fixture(scope="module")
def make_pools(make_llm):
    """make_pools(model, prefill=tensor sizes, decode=tensor sizes, …): workers that know each other, few at once."""
    kept: dict = {}

    def build(model, prefill, decode, transport, limits, decode_options, **options) -> Pools:
        workers, addresses = {}, []
        sizes = [(f"prefill{i or ''}", "prefill", n) for i, n in enumerate(prefill)]
        sizes += [(f"decode{i or ''}", "decode", n) for i, n in enumerate(decode)]
        for name, role, tensor in sizes:
            more = dict(decode_options) if role == "decode" else {}
            llm = make_llm.fresh(model, **{**SMALL, "mesh": f"tensor={tensor}", **options, **more})
            if transport == "memory":
                carrier = MemoryTransport(SPACE, f"{name}-{model}-{prefill}-{decode}-{limits}")
            else:
                carrier = make_transport(transport, KEY.encode(), "127.0.0.1")
            peers = tuple(addresses) if role == "decode" else ()
            handoff = HandoffOptions(role, KEY, peers=peers, limits=limits or HandoffLimits())
            engine = make_worker(llm.engine, llm.blueprint, llm.fingerprint, handoff, carrier)
            if role == "prefill":
                addresses.append(engine.links.address)
            workers[name] = (engine, Generator(engine, llm.generator.reader))
        return Pools(workers)

    def make(model, prefill=(1,), decode=(1,), transport="memory", limits=None, decode_options=(), **options) -> Pools:
        key = (model, prefill, decode, transport, limits, decode_options, *sorted(options.items()))
        if key not in kept:
            while len(kept) >= 2:
                kept.pop(next(iter(kept))).close()
            kept[key] = build(model, prefill, decode, transport, limits, decode_options, **options)
        return kept[key]

    yield make
    for pools in kept.values():
        pools.close()


@pytest.fixture
def pools(make_pools):
    """`make_pools`, whose transports work again after the test."""
    made: list[Pools] = []

    def make(*args, **options) -> Pools:
        made.append(make_pools(*args, **options))
        return made[-1]

    yield make
    for each in made:
        each.mend()


@pytest.mark.parametrize("name", ["smollm2", "deepseek_v3", "gemma3_text"])
@pytest.mark.parametrize(("prefill", "decode"), [((1,), (1,)), ((1,), (4,)), ((2, 1), (1,))])
def test_handed_over_equals_colocated(make_llm, pools, name, prefill, decode):
    if (name != "smollm2" and (prefill, decode) == ((2, 1), (1,))) or (name == "gemma3_text" and decode == (4,)):
        pytest.skip("one model runs on every split")
    one, apart = make_llm(name, **SMALL), pools(name, prefill, decode)
    outputs = apart.run(MIXED, greedy())
    assert tokens_of(outputs) == tokens_of(one.generate(MIXED, greedy()))
    assert apart.engine("decode").stats()["handoffs"] > 0
    apart.settle()


@pytest.mark.parametrize("transport", ["jax", "socket"])
def test_networked_transports_move_the_same_pages(make_llm, pools, transport):
    one, apart = make_llm("smollm2", **SMALL), pools("smollm2", transport=transport)
    assert tokens_of(apart.run(MIXED, greedy())) == tokens_of(one.generate(MIXED, greedy()))
    assert apart.engine("decode").stats()["kv_bytes_moved"] > 0
    apart.settle()


@pytest.mark.parametrize("name", ["smollm2", "deepseek_v3"])
def test_eight_bit_kv_travels_with_its_scales(make_llm, pools, name):
    one, apart = make_llm(name, **SMALL, kv_dtype="int8"), pools(name, kv_dtype="int8")
    assert tokens_of(apart.run(MIXED, greedy())) == tokens_of(one.generate(MIXED, greedy()))
    assert apart.engine("decode").stats()["handoffs"] > 0
    apart.settle()


def test_300_requests_with_shared_prefixes_aborts_and_seeds_p11(make_llm, pools):
    one, apart = make_llm("smollm2", **SMALL), pools("smollm2", (1, 1), (1,))
    rng = random.Random(2)
    stems = prompts_of(5, [40, 24, 17])
    prompts = [rng.choice(stems)[: rng.randrange(1, 40)] + prompts_of(i, [rng.randrange(1, 20)])[0] for i in range(300)]
    params = [
        SamplingParams(temperature=rng.choice([0.0, 0.8]), seed=i, max_tokens=rng.randrange(1, 10), ignore_eos=True)
        for i in range(300)
    ]
    expected = tokens_of(one.generate(prompts, params))
    aborted = list(range(0, 300, 17))
    generator = apart.workers["decode"][1]

    def leave(step: int) -> None:
        if step % 3 == 0 and aborted:
            generator.abort(str(aborted.pop()))

    outputs = apart.run(prompts, params, each=leave)
    kept = [i for i, output in enumerate(outputs) if output.outputs[0].finish_reason != "abort"]
    assert len(kept) > 250
    assert [outputs[i].outputs[0].token_ids for i in kept] == [expected[i] for i in kept]
    assert all(output.num_cached_tokens < len(output.prompt_token_ids) for output in outputs)
    assert apart.engine("decode").stats()["kv_pages_found"] > 0
    apart.settle()


def faulty(pools: Pools, name: str, times: int) -> None:
    """The next fetches of a worker fail."""
    left = [times]

    def fault() -> None:
        if left[0]:
            left[0] -= 1
            raise TransferError("the wire was cut")

    pools.engine(name).transport.fault = fault


def test_a_failed_transfer_is_tried_again_from_the_lease(make_llm, pools):
    one, apart = make_llm("smollm2", **SMALL), pools("smollm2")
    prompt = prompts_of(101, [40])
    faulty(apart, "decode", 1)
    before = apart.count("decode", "handoff.transfer_failures", "handoffs"), apart.count("prefill", "handoff.resends")
    assert tokens_of(apart.run(prompt, greedy())) == tokens_of(one.generate(prompt, greedy()))
    failures, handoffs = apart.count("decode", "handoff.transfer_failures", "handoffs")
    assert (failures - before[0][0], handoffs - before[0][1]) == (1, 1)
    assert apart.count("prefill", "handoff.resends")[0] - before[1][0] == 1
    apart.settle()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_transport_that_never_works_meets_the_policy_p07(make_llm, pools, policy):
    limits = HandoffLimits(policy, lease_s=2.0, beat_s=0.05, silence_s=1.0, deadline_s=20.0, max_attempts=2)
    one, apart = make_llm("smollm2", **SMALL), pools("smollm2", limits=limits)
    faulty(apart, "decode", 10**9)
    prompt = prompts_of(105, [40])
    output = apart.run(prompt, greedy())[0].outputs[0]
    if policy == "fail":
        assert output.finish_reason == "error"
    else:
        assert output.token_ids == tokens_of(one.generate(prompt, greedy()))[0]
    apart.settle()


def test_pages_that_changed_on_the_way_are_not_believed_p01(make_llm, pools):
    one, apart = make_llm("smollm2", **SMALL), pools("smollm2")
    engine, left = apart.engine("decode"), [1]

    def corrupt() -> None:
        if left[0]:
            left[0] -= 1
            for place in [place for place in SPACE if place[0].startswith("prefill")]:
                SPACE[place] = [array + 1 for array in SPACE[place]]

    engine.transport.fault = corrupt
    prompt, (before,) = prompts_of(102, [40]), apart.count("decode", "handoff.digest_failures")
    assert tokens_of(apart.run(prompt, greedy())) == tokens_of(one.generate(prompt, greedy()))
    assert apart.count("decode", "handoff.digest_failures")[0] - before == 1
    apart.settle()


def test_a_client_that_leaves_frees_both_sides_at_once_p03(pools):
    apart = pools("smollm2")
    (before,) = apart.count("decode", "handoffs")
    generator = apart.workers["decode"][1]
    generator.add("gone", prompts_of(103, [60])[0], greedy())
    for _ in range(2):
        apart.step("prefill")
    generator.abort("gone")
    generator.take("gone")
    apart.settle()
    assert apart.count("decode", "handoffs")[0] == before


def test_aborting_what_was_never_there_changes_nothing_p10(make_llm, pools):
    one, apart = make_llm("smollm2", **SMALL), pools("smollm2")
    apart.engine("decode").abort("nobody")
    assert tokens_of(apart.run(MIXED[:2], greedy())) == tokens_of(one.generate(MIXED[:2], greedy()))
    apart.settle()


def test_a_prompt_that_prefill_refuses_is_refused_to_the_client_p14(pools):
    apart = pools("smollm2", decode_options=(("max_model_len", 64),), max_model_len=32)
    generator = apart.workers["decode"][1]
    generator.add("long", prompts_of(3, [50])[0], greedy(2))
    end = time.monotonic() + 30
    errors = []
    while not errors and time.monotonic() < end:
        apart.workers["prefill"][1].step()
        errors = [delta.error for delta in generator.step() if delta.error is not None]
    assert "the prompt must be shorter" in str(errors[0])
    generator.take("long")
    apart.settle()


def test_usage_counts_what_either_side_had_p17(make_llm, pools):
    apart = pools("smollm2")
    prompt = prompts_of(104, [40])[0]
    first, second = (apart.run([prompt], greedy(2))[0].num_cached_tokens for _ in range(2))
    assert first == 0
    assert 0 < second < len(prompt)
    apart.settle()

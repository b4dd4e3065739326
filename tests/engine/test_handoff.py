"""Workers that hand prompts to each other give the tokens of one engine, and every page comes home."""

import itertools
import time
from dataclasses import replace

import pytest

from tests.conftest import GOLDEN
from tests.engine.helpers import DRAFTING, HEAD, equal_drafts, greedy, note_drafts, tokens_of
from tests.engine.test_equalities import MIXED, SMALL, prompts_of, tight_memory
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
NUMBERS = itertools.count()


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

    def run(self, prompts, params, places=None, each=lambda step: None, limit_s: float = 240.0):
        """Outputs of the workers named in `places`, one a prompt; `each(step)` is called between steps."""
        params = params if isinstance(params, list) else [params] * len(prompts)
        places = [self.workers[name][1] for name in places or ["decode"] * len(prompts)]
        for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            places[i].add(str(i), prompt, one)
        step, end = 0, time.monotonic() + limit_s
        while not all(generator.output(str(i)).finished for i, generator in enumerate(places)):
            self.step()
            each(step)
            step += 1
            assert time.monotonic() < end, {name: engine.stats() for name, (engine, _) in self.workers.items()}
        return [generator.take(str(i)) for i, generator in enumerate(places)]

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
            for scheduler in engine.engine.schedulers:
                for group in scheduler.cache.groups:
                    assert group.pool.num_leased == 0, name


@pytest.fixture(scope="module")
def make_pools(make_llm):
    """make_pools(model, prefill=tensor sizes or meshes, decode=the same, …): workers that know each other, few at
    once."""
    kept: dict = {}

    def build(model, prefill, decode, transport, limits, decode_options, prefill_options, **options) -> Pools:
        workers, addresses = {}, []
        sizes = [(f"prefill{i or ''}", "prefill", n) for i, n in enumerate(prefill)]
        sizes += [(f"decode{i or ''}", "decode", n) for i, n in enumerate(decode)]
        for name, role, size in sizes:
            more = dict(decode_options if role == "decode" else prefill_options)
            mesh = size if isinstance(size, str) else f"tensor={size}"
            llm = make_llm.fresh(model, **{**SMALL, "mesh": mesh, **options, **more})
            if transport == "memory":
                carrier = MemoryTransport(SPACE, f"{name}-{next(NUMBERS)}")
            else:
                carrier = make_transport(transport, KEY.encode(), "127.0.0.1")
            peers = tuple(addresses) if role == "decode" else ()
            handoff = HandoffOptions(role, KEY, peers=peers, limits=limits or HandoffLimits())
            engine = make_worker(llm.engine, llm.blueprint, llm.fingerprint, handoff, carrier)
            if role == "prefill":
                addresses.append(engine.links.address)
            workers[name] = (engine, Generator(engine, llm.generator.reader))
        return Pools(workers)

    def make(
        model,
        prefill=(1,),
        decode=(1,),
        transport="memory",
        limits=None,
        decode_options=(),
        prefill_options=(),
        **options,
    ) -> Pools:
        own = (decode_options, prefill_options)
        key = (model, prefill, decode, transport, limits, *own, *sorted(options.items()))
        if key not in kept:
            while len(kept) >= 2:
                kept.pop(next(iter(kept))).close()
            kept[key] = build(model, prefill, decode, transport, limits, *own, **options)
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


SPLITS = [
    ((1,), (1,), "memory"),
    ((1,), (4,), "memory"),
    ((2, 1), (1,), "socket"),
    ((1,), (1, 2), "jax"),
    (("data=2",), ("data=2,tensor=2", 1), "memory"),
]


@pytest.fixture
def pair(make_llm, pools):
    """pair(name, …): pools whose decode workers have so few pages that they preempt."""

    def make(name="smollm2", prefill=(1,), decode=(1,), transport="memory") -> Pools:
        memory = tight_memory(make_llm(name, **SMALL), 26)
        return pools(name, prefill, decode, transport, decode_options=(("kv_memory", memory), ("max_model_len", 80)))

    return make


@pytest.mark.parametrize(
    ("name", "prefill", "decode", "transport"),
    [(name, *split) for split in SPLITS for name in ("smollm2", "deepseek_v3")],
)
def test_300_mixed_requests_with_shared_prefixes_and_aborts_p11(pair, mixed, name, prefill, decode, transport):
    """The KV a request decodes from is the KV of its own prompt, for hundreds of requests."""
    requests, apart = mixed(name), pair(name, prefill, decode, transport)
    decoders = [name for name in apart.workers if name.startswith("decode")]
    for worker in decoders:
        for scheduler in apart.engine(worker).engine.schedulers:
            scheduler._lengths._prior = 1  # answers are taken to be short
    places = [decoders[i % len(decoders)] for i in range(len(requests.prompts))]
    leave = requests.aborting(lambda i: apart.workers[places[i]][1].abort(str(i)))
    requests.check(apart.run(requests.prompts, requests.params, places, each=leave))
    for figure in ("handoffs", "kv_pages_found"):
        assert min(apart.count(worker, figure)[0] for worker in decoders) > 0
    apart.settle()


def test_pages_of_a_window_go_when_the_prompt_is_computed(make_llm, pools):
    one, apart = make_llm("gemma3_text", **SMALL), pools("gemma3_text")
    assert tokens_of(apart.run(MIXED, greedy())) == tokens_of(one.generate(MIXED, greedy()))
    assert apart.engine("decode").stats()["handoffs"] > 0
    apart.settle()


def test_tiers_of_the_prefill_worker_and_drafts_of_the_decode_worker(make_llm, pools):
    """A prefix that the prefill worker's device gave up comes from its host memory; drafts change no token."""
    one = make_llm("smollm2", **SMALL)
    options = {"prefill_options": (("kv_memory", tight_memory(one, 30)), ("max_model_len", 112), ("host_kv", 1e8))}
    apart = pools("smollm2", decode_options=(("speculate", "ngram,suffix"), ("prefix_caching", False)), **options)
    prefill, decode = apart.engine("prefill").engine, apart.engine("decode").engine
    prefill.tiering.promoter.chooses = False
    decode.speculation.draft_always()
    prompts = [prompt[:20] * 3 for prompt in prompts_of(76, [20] * 12)]
    expected = tokens_of(one.generate(prompts, greedy(24)))
    for _ in range(2):
        assert [tokens_of(apart.run([prompt], greedy(24)))[0] for prompt in prompts] == expected
    assert prefill.stats()["kv_host.hit_tokens"] > 0
    assert decode.stats()["speculate.ngram.accepted"] + decode.stats()["speculate.suffix.accepted"] > 0
    apart.settle()


@pytest.mark.parametrize(
    ("name", "speculate"),
    [(DRAFTING, HEAD["speculate"]), ("smollm2", f"draft:{GOLDEN / 'tiny' / 'smollm2'}"), ("deepseek_v3_mtp", "mtp")],
)
def test_models_draft_from_the_kv_that_prefill_computed(make_llm, pools, monkeypatch, name, speculate):
    """Drafts are those of one engine: its KV came along, that of the last position with the token that follows."""
    options = {**HEAD, "speculate": speculate}
    one, apart = make_llm(name, **options), pools(name, **options)
    drafts = [note_drafts(engine, monkeypatch) for engine in (one.engine, apart.engine("decode").engine)]
    one.generate(MIXED[5:], greedy(24))
    apart.run(MIXED[5:], greedy(24))
    equal_drafts(*drafts)
    assert apart.count("decode", "handoffs") == (3,)
    apart.settle()


@pytest.mark.parametrize(
    ("name", "source", "target"), [("smollm2", "int8", "float32"), ("deepseek_v3", "float32", "int8")]
)
def test_kv_is_converted_where_it_arrives(make_llm, pools, name, source, target):
    one = make_llm(name, **SMALL)
    apart = pools(name, prefill_options=(("kv_dtype", source),), decode_options=(("kv_dtype", target),))
    prompt, params = prompts_of(77, [50]), greedy(1, logprobs=0)
    (found,), (expected,) = apart.run(prompt, params), one.generate(prompt, params)
    assert apart.count("decode", "handoffs")[0] > 0
    (ours,), (theirs,) = (output.outputs[0].logprobs[0].values() for output in (found, expected))
    assert ours.logprob == pytest.approx(theirs.logprob, abs=0.2)
    apart.settle()


def faulty(pools: Pools, name: str, times: int) -> None:
    """The next fetches of a worker fail."""
    left = [times]

    def fault() -> None:
        if left[0]:
            left[0] -= 1
            raise TransferError("the wire was cut")

    transport = pools.engine(name).transport
    assert isinstance(transport, MemoryTransport)
    transport.fault = fault


def test_a_failed_transfer_is_tried_again_from_the_lease(make_llm, pair):
    one, apart = make_llm("smollm2", **SMALL), pair()
    prompt = prompts_of(101, [40])
    faulty(apart, "decode", 1)
    before = apart.count("decode", "handoff.transfer_failures", "handoffs"), apart.count("prefill", "handoff.resends")
    assert tokens_of(apart.run(prompt, greedy())) == tokens_of(one.generate(prompt, greedy()))
    failures, handoffs = apart.count("decode", "handoff.transfer_failures", "handoffs")
    assert (failures - before[0][0], handoffs - before[0][1]) == (1, 1)
    assert apart.count("prefill", "handoff.resends")[0] - before[1][0] == 1
    apart.settle()


def test_a_transport_that_never_works_meets_the_policy_p07(make_llm, pools):
    limits = HandoffLimits("recompute", lease_s=2.0, beat_s=0.05, silence_s=1.0, deadline_s=20.0, max_attempts=2)
    one, apart = make_llm("smollm2", **SMALL), pools("smollm2", limits=limits, max_running=1)
    faulty(apart, "decode", 10**9)
    prompt = prompts_of(105, [40])
    assert tokens_of(apart.run(prompt, greedy())) == tokens_of(one.generate(prompt, greedy()))
    apart.engine("decode").decode_jobs._limits = replace(limits, on_transfer_failure="fail")
    assert apart.run(prompts_of(106, [40]), greedy())[0].outputs[0].finish_reason == "error"
    apart.settle()


def test_pages_that_changed_on_the_way_are_not_believed_p01(make_llm, pair):
    one, apart = make_llm("smollm2", **SMALL), pair()
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


def test_a_client_that_leaves_frees_both_sides_at_once_p03(pair):
    apart = pair()
    (before,) = apart.count("decode", "handoffs")
    generator = apart.workers["decode"][1]
    generator.add("gone", prompts_of(103, [60])[0], greedy())
    for _ in range(2):
        apart.step("prefill")
    generator.abort("gone")
    generator.take("gone")
    apart.settle()
    assert apart.count("decode", "handoffs")[0] == before


def test_a_worker_whose_last_lease_ends_while_it_waits_for_messages_changes_its_role(pair):
    apart = pair()
    prefill, generator = apart.engine("prefill"), apart.workers["decode"][1]
    generator.add("gone", prompts_of(107, [60])[0], greedy())
    while not prefill.prefill_side.num_jobs:
        apart.step()
    prefill.switch("decode")
    generator.abort("gone")
    generator.take("gone")
    while prefill.prefill_side.num_jobs:
        prefill._read(1.0)
    assert prefill.has_work
    prefill.step()
    assert prefill.role == "decode"
    prefill.switch("prefill")
    apart.settle()


def test_aborting_what_was_never_there_changes_nothing_p10(make_llm, pair):
    one, apart = make_llm("smollm2", **SMALL), pair()
    apart.engine("decode").abort("nobody")
    assert tokens_of(apart.run(MIXED[:2], greedy())) == tokens_of(one.generate(MIXED[:2], greedy()))
    apart.settle()


def test_a_prompt_that_prefill_refuses_is_refused_to_the_client_p14(pools):
    apart = pools("smollm2", decode_options=(("max_model_len", 64),), max_model_len=32, max_running=1)
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


def test_usage_counts_what_either_side_had_p17(make_llm, pair):
    apart = pair()
    prompt = prompts_of(104, [40])[0]
    first, second = (apart.run([prompt], greedy(2))[0].num_cached_tokens for _ in range(2))
    assert first == 0
    assert 0 < second < len(prompt)
    apart.settle()

"""Random histories on tiny pools: every page read holds the right tokens, and every request ends rightly."""

import pytest
from fake_device import EOS, VOCAB, FakeEngine, make_request, make_scheduler, next_token, true_output
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from trillion_infer.cache.kv_cache import KVCache
from trillion_infer.config.cache import CacheGroup
from trillion_infer.core.errors import InvalidRequestError
from trillion_infer.core.request import Request, Status
from trillion_infer.core.sampling_params import SamplingParams

MAX_LEN = 40

STEMS = [[1], [2, 3], [1, 1, 2, 2, 3, 3, 4, 4], [1, 1, 2, 2, 3, 3, 4, 5], list(range(1, 11)) * 2]


@st.composite
def cache_groups(draw) -> list[CacheGroup]:
    pages = st.integers(3, 24)
    groups = []
    for kind in draw(st.lists(st.sampled_from(["full", "window", "chunk"]), min_size=1, max_size=2)):
        window = draw(st.integers(1, 9)) if kind == "window" else None
        chunk = draw(st.integers(1, 9)) if kind == "chunk" else None
        groups.append(CacheGroup(f"{kind}{len(groups)}", window, draw(pages), chunk))
    return groups


class Histories(RuleBasedStateMachine):
    """Adds, drafts, steps, late completions and aborts in any order."""

    @initialize(
        groups=cache_groups(),
        page_size=st.integers(1, 5),
        max_running=st.integers(1, 4),
        extra_tokens=st.integers(0, 12),
        prefill_chunk=st.integers(1, 16),
        chunked=st.booleans(),
        depth=st.integers(0, 3),
        prefix=st.booleans(),
        expected=st.sampled_from([1, 8, 100]),
    )
    def start(self, groups, page_size, max_running, extra_tokens, prefill_chunk, chunked, depth, prefix, expected):
        scheduler = make_scheduler(
            groups,
            page_size,
            {"enable_prefix": prefix},
            max_running=max_running,
            max_batch_tokens=max_running + extra_tokens + (0 if chunked else MAX_LEN),
            prefill_chunk=prefill_chunk,
            max_model_len=MAX_LEN,
            chunked_prefill=chunked,
            expected_output=expected,
        )
        self.engine = FakeEngine(scheduler, depth)
        self.scheduler = scheduler
        self.requests: list[Request] = []

    @rule(
        stem=st.sampled_from(STEMS),
        tail=st.lists(st.integers(1, 3), max_size=6),
        max_tokens=st.integers(1, 20),
        salt=st.sampled_from(["", "", "", "tenant"]),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        careful=st.booleans(),
        open_ended=st.booleans(),
        logprobs=st.sampled_from([None, None, None, 0]),
        stops=st.booleans(),
    )
    def add(self, stem, tail, max_tokens, salt, priority, careful, open_ended, logprobs, stops):
        params = SamplingParams(max_tokens=None if open_ended else max_tokens, prompt_logprobs=logprobs)
        request = make_request(
            len(self.requests),
            stem + tail,
            MAX_LEN if open_ended else max_tokens,
            params=params,
            cache_salt=salt,
            priority=priority,
            needs_known_tokens=careful,
            eos_ids=frozenset({EOS}) if stops else frozenset(),
        )
        try:
            self.scheduler.add(request)
        except InvalidRequestError:
            return
        self.requests.append(request)

    @rule()
    def step(self):
        self.engine.step()

    @rule(count=st.integers(2, 12))
    def several_steps(self, count):
        for _ in range(count):
            self.engine.step()

    @rule()
    def late_tokens_arrive(self):
        self.engine.complete_oldest()

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), right=st.integers(0, 4), wrong=st.integers(0, 3))
    def draft(self, data, right, wrong):
        """Propose some right tokens, then some wrong ones."""
        request = data.draw(st.sampled_from(self.requests))
        if request.status is Status.RUNNING:
            ids = request.known_ids()
            for _ in range(right):
                ids.append(next_token(request, ids))
            request.draft_ids = (*ids[request.num_known :], *[VOCAB + i for i in range(wrong)])

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        request = data.draw(st.sampled_from(self.requests))
        live = not request.status.is_finished
        assert (self.scheduler.abort(request.request_id) is request) == live

    @rule()
    def clear_cache(self):
        self.scheduler.cache.clear()

    @invariant()
    def pages_slots_and_requests_add_up(self):
        self.scheduler.check_integrity()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.engine.run(max_steps=3000)
        for request in self.requests:
            assert request.status.is_finished
            assert request.num_in_flight == 0
            assert request.num_cached_tokens < len(request.prompt_ids)
            truth = true_output(request)
            if request.status is Status.FINISHED_ABORT:
                assert request.output_ids == truth[: len(request.output_ids)]
            else:
                assert request.output_ids == truth
        for group in self.scheduler.cache.groups:
            assert group.pool.num_free + group.pool.num_cached == group.pool.num_pages


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_a_stale_page_would_be_noticed(monkeypatch):
    """The device's check has teeth: a cache that names blocks one token too early is caught."""
    real = KVCache.commit

    def early(self, request):
        if request not in self._committed:
            return
        request.num_computed += 1
        real(self, request)
        request.num_computed -= 1

    monkeypatch.setattr(KVCache, "commit", early)
    engine = FakeEngine(make_scheduler(prefill_chunk=7))
    engine.scheduler.add(make_request("a", range(1, 11)))
    engine.step()
    engine.scheduler.add(make_request("b", [*range(1, 9), 50, 51]))
    with pytest.raises(AssertionError, match="wrong token"):
        engine.run()

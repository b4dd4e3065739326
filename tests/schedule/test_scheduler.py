"""The scheduler's rules, one by one, against a device that checks every page it reads."""

import pytest
from fake_device import EOS, FakeEngine, make_request, make_scheduler, true_output

from trillion_infer.config.cache import CacheGroup
from trillion_infer.core.errors import InvalidRequestError, QueueFullError
from trillion_infer.core.request import Request, Status
from trillion_infer.core.sampling_params import SamplingParams


def rows_of(plan):
    return [(row.request.request_id, row.start, row.length, row.samples) for row in plan.rows]


def run_all(engine, requests):
    for request in requests:
        engine.scheduler.add(request)
    engine.run()
    for request in requests:
        assert request.output_ids == true_output(request), f"request {request.request_id} got a wrong answer"


def test_prompt_is_computed_in_chunks_and_the_last_one_samples():
    scheduler = make_scheduler(prefill_chunk=8)
    scheduler.add(make_request("a", range(20)))
    plans = [rows_of(scheduler.schedule()) for _ in range(4)]
    assert plans == [[("a", 0, 8, False)], [("a", 8, 8, False)], [("a", 16, 4, True)], [("a", 20, 1, True)]]


def test_without_chunks_a_prompt_is_one_row():
    scheduler = make_scheduler(prefill_chunk=8, chunked_prefill=False, max_model_len=50, max_batch_tokens=60)
    scheduler.add(make_request("a", range(40)))
    scheduler.add(make_request("b", range(100, 130)))
    assert rows_of(scheduler.schedule()) == [("a", 0, 40, True)]
    assert rows_of(scheduler.schedule()) == [("a", 40, 1, True), ("b", 0, 30, True)]


def test_decodes_go_before_prefill_in_the_budget_and_in_the_order():
    scheduler = make_scheduler(max_batch_tokens=10, prefill_chunk=10)
    scheduler.add(make_request("a", [1, 2, 3]))
    scheduler.schedule()
    scheduler.add(make_request("b", range(20)))
    assert rows_of(scheduler.schedule()) == [("a", 3, 1, True), ("b", 0, 9, False)]


def test_prompts_share_the_prefill_budget_in_order_of_arrival():
    scheduler = make_scheduler(prefill_chunk=10)
    for name in "abc":
        scheduler.add(make_request(name, [ord(name)] * 6))
    assert rows_of(scheduler.schedule()) == [("a", 0, 6, True), ("b", 0, 4, False)]


def test_a_limit_holds_for_tokens_and_rows_until_it_is_raised():
    scheduler = make_scheduler(max_running=4, prefill_chunk=16)
    scheduler.limit(tokens=6, rows=2)
    for name in "abc":
        scheduler.add(make_request(name, [ord(name)] * 4))
    assert rows_of(scheduler.schedule()) == [("a", 0, 4, True), ("b", 0, 2, False)]
    assert rows_of(scheduler.schedule()) == [("a", 4, 1, True), ("b", 2, 2, True)]
    scheduler.limit(tokens=1000, rows=1000)
    assert rows_of(scheduler.schedule()) == [("a", 5, 1, True), ("b", 4, 1, True), ("c", 0, 4, True)]


def test_smaller_priority_goes_first():
    scheduler = make_scheduler(prefill_chunk=4)
    scheduler.add(make_request("later", [1, 2, 3, 4], priority=1))
    scheduler.add(make_request("sooner", [5, 6, 7, 8], priority=-1))
    assert [row[0] for row in rows_of(scheduler.schedule())] == ["sooner"]


def test_no_more_tokens_are_asked_for_than_max_tokens():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=3))
    plans = [scheduler.schedule() for _ in range(3)]
    assert all(plan.rows[0].samples for plan in plans)
    assert scheduler.schedule() is None
    assert scheduler.has_work


def test_a_request_that_needs_known_tokens_never_runs_ahead():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2, 3], needs_known_tokens=True))
    plan = scheduler.schedule()
    assert scheduler.schedule() is None
    scheduler.complete(plan.rows[0], [7])
    assert rows_of(scheduler.schedule()) == [("a", 3, 1, True)]


def test_slots_are_numbered_from_zero_and_reused():
    scheduler = make_scheduler(max_running=2)
    for name in "abc":
        scheduler.add(make_request(name, [ord(name)] * 3))
    plan = scheduler.schedule()
    assert [request.slot for request in plan.admitted] == [0, 1]
    scheduler.abort("a")
    assert [(r.request_id, r.slot) for r in scheduler.schedule().admitted] == [("c", 0)]


def test_abort_before_the_first_step_has_no_effect_on_others():
    """P10."""
    engine = FakeEngine(make_scheduler())
    engine.scheduler.add(make_request("gone", [1, 2, 3]))
    other = make_request("other", [4, 5, 6])
    engine.scheduler.add(other)
    assert engine.scheduler.abort("gone").status is Status.FINISHED_ABORT
    engine.run()
    assert other.output_ids == true_output(other)


def test_abort_of_an_unknown_id_does_nothing():
    scheduler = make_scheduler()
    assert scheduler.abort("nobody") is None
    scheduler.check_integrity()


def test_abort_in_flight_frees_pages_at_once_and_drops_the_token():
    """U45: free + cached == total without waiting for the device."""
    scheduler = make_scheduler()
    request = make_request("a", range(10), max_tokens=50)
    scheduler.add(request)
    plans = [scheduler.schedule(), scheduler.schedule()]
    scheduler.abort("a")
    pool = scheduler.cache.groups[0].pool
    assert pool.num_free + pool.num_cached == pool.num_pages
    assert [scheduler.complete(plan.rows[0], [5]) for plan in plans] == [False, False]
    assert request.output_ids == []
    assert request.num_in_flight == 0
    assert not scheduler.has_work
    scheduler.check_integrity()


def test_finish_twice_is_harmless():
    scheduler = make_scheduler()
    request = make_request("a", [1, 2])
    scheduler.add(request)
    scheduler.finish(request, Status.FINISHED_STOP)
    scheduler.finish(request, Status.FINISHED_LENGTH)
    assert request.status is Status.FINISHED_STOP
    scheduler.check_integrity()


def test_full_pool_preempts_the_newest_and_every_answer_is_right():
    """U48 and U50: pool for less than two whole requests, three that grow."""
    groups = [CacheGroup("full", None, 11)]
    engine = FakeEngine(make_scheduler(groups, expected_output=1))
    requests = [make_request(i, [i + 1] * 8, max_tokens=30) for i in range(3)]
    run_all(engine, requests)
    assert engine.scheduler.preemptions > 0
    assert requests[0].metrics.preemptions == 0, "the oldest must never be preempted"


def test_preempted_request_waits_for_its_tokens_in_flight():
    groups = [CacheGroup("full", None, 4)]
    scheduler = make_scheduler(groups, expected_output=1)
    old, new = make_request("old", [1] * 7, max_tokens=9), make_request("new", [2] * 7, max_tokens=9)
    scheduler.add(old)
    scheduler.add(new)
    first = scheduler.schedule()
    second = scheduler.schedule()
    third = scheduler.schedule()
    assert third.preempted == [new]
    assert new.status is Status.WAITING
    assert new.num_in_flight == 2
    scheduler.abort("old")
    assert scheduler.schedule() is None
    scheduler.complete(first.rows[1], [8])
    assert scheduler.schedule() is None
    scheduler.complete(second.rows[1], [9])
    (row,) = scheduler.schedule().rows
    assert row.start + row.length == 9, "prompt and known tokens are recomputed"
    assert row.samples, "the next token is sampled"


def test_lone_request_runs_however_long_the_expected_answer():
    engine = FakeEngine(make_scheduler([CacheGroup("full", None, 5)], expected_output=1000))
    run_all(engine, [make_request("a", [3] * 10, max_tokens=11)])


def test_admission_counts_what_running_requests_will_grow_into():
    """P16 and P08: two requests of 40 tokens each do not start together in a pool for 60."""
    engine = FakeEngine(make_scheduler([CacheGroup("full", None, 15)]))
    run_all(engine, [make_request(i, [i + 1] * 8, max_tokens=32) for i in range(4)])
    assert engine.scheduler.preemptions == 0
    assert max(len(plan.rows) for plan in engine.plans) == 1


def test_admission_learns_how_long_answers_are():
    """Answers that end early let more requests in than max_tokens would."""
    engine = FakeEngine(make_scheduler([CacheGroup("full", None, 20)], expected_output=70))
    for i in range(40):
        engine.scheduler.add(make_request(i, [i % 10 + 1, i // 10 + 1], max_tokens=70, eos_ids=frozenset(range(6))))
    engine.run()
    together = [len(plan.rows) for plan in engine.plans]
    assert max(together[:3]) == 1
    assert max(together) > 1


def test_shared_prefix_pages_count_once_at_admission():
    groups = [CacheGroup("full", None, 12)]
    scheduler = make_scheduler(groups, prefill_chunk=24)
    shared = list(range(1, 21))
    scheduler.add(make_request("a", [*shared, 1], max_tokens=8))
    scheduler.schedule()
    scheduler.add(make_request("b", [*shared, 2], max_tokens=8))
    assert [r.request_id for r in scheduler.schedule().admitted] == ["b"]


def test_second_of_two_equal_prompts_waits_for_the_first_and_reuses_it():
    engine = FakeEngine(make_scheduler())
    requests = [make_request(i, range(1, 18), max_tokens=4) for i in range(3)]
    run_all(engine, requests)
    assert [r.num_cached_tokens for r in requests] == [0, 16, 16]
    assert engine.device.computed_tokens <= 17 + 1 + 1 + 3 * 4


def test_one_that_waits_for_a_prefix_does_not_hold_up_others():
    scheduler = make_scheduler(prefill_chunk=16)
    for name, prompt in (("a", range(1, 14)), ("twin", range(1, 14)), ("other", [9, 9, 9])):
        scheduler.add(make_request(name, prompt))
    assert [r.request_id for r in scheduler.schedule().admitted] == ["a", "other"]
    assert [r.request_id for r in scheduler.schedule().admitted] == ["twin"]


def test_aborting_the_first_of_two_equal_prompts_lets_the_second_start():
    engine = FakeEngine(make_scheduler(prefill_chunk=8))
    first, second = (make_request(i, range(1, 30), max_tokens=4) for i in range(2))
    engine.scheduler.add(first)
    engine.scheduler.add(second)
    engine.step()
    engine.scheduler.abort("0")
    engine.run()
    assert second.output_ids == true_output(second)


def test_cached_tokens_never_reach_the_length_of_the_prompt():
    """P17: the last prompt token is always computed."""
    engine = FakeEngine(make_scheduler())
    for round_number in range(2):
        request = make_request(round_number, range(1, 17), max_tokens=2)
        run_all(engine, [request])
    assert request.num_cached_tokens == 12


def test_prompt_logprobs_compute_every_position():
    engine = FakeEngine(make_scheduler())
    params = SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=2)
    requests = [make_request(i, range(1, 17), max_tokens=2, params=params) for i in range(2)]
    run_all(engine, requests)
    assert [r.num_cached_tokens for r in requests] == [0, 0]


def test_verification_row_keeps_accepted_drafts_and_rewinds_the_rest():
    engine = FakeEngine(make_scheduler(max_batch_tokens=40), depth=0)
    request = make_request("a", [1, 2, 3], max_tokens=20)
    truth = true_output(request)
    engine.scheduler.add(request)
    while engine.scheduler.has_work:
        done = len(request.output_ids)
        if done:
            good = truth[done : done + done % 4]
            request.draft_ids = (*good, 99, 98)
        plan = engine.step()
        assert plan is not None
        assert len(request.output_ids) <= len(truth)
    assert request.output_ids == truth
    assert any(len(row.draft_ids) > 2 for plan in engine.plans for row in plan.rows)


def test_drafts_never_ask_for_more_than_max_tokens():
    scheduler = make_scheduler(max_batch_tokens=40)
    request = make_request("a", [1, 2, 3], max_tokens=4)
    scheduler.add(request)
    scheduler.complete(scheduler.schedule().rows[0], [5])
    request.draft_ids = (6, 7, 8, 9, 10)
    (row,) = scheduler.schedule().rows
    assert row.draft_ids == (6, 7)
    assert row.length == 3
    assert request.draft_ids == ()


def test_nothing_more_runs_while_a_verification_is_in_flight():
    scheduler = make_scheduler(max_batch_tokens=40)
    request = make_request("a", [1, 2, 3], max_tokens=10)
    scheduler.add(request)
    scheduler.complete(scheduler.schedule().rows[0], [5])
    request.draft_ids = (6, 7)
    (row,) = scheduler.schedule().rows
    assert scheduler.schedule() is None
    scheduler.complete(row, [6, 4])
    assert request.output_ids == [5, 6, 4]
    assert request.num_computed == 5
    assert rows_of(scheduler.schedule()) == [("a", 5, 1, True)]


def test_end_of_sequence_stops_a_request_that_runs_ahead():
    engine = FakeEngine(make_scheduler())
    requests = [make_request(i, [i + 1, 2], max_tokens=40, eos_ids=frozenset({EOS})) for i in range(8)]
    run_all(engine, requests)
    assert Status.FINISHED_STOP in {r.status for r in requests}


def test_windowed_group_holds_only_its_window():
    groups = [CacheGroup("full", None, 32), CacheGroup("window", 6, 5)]
    engine = FakeEngine(make_scheduler(groups, prefill_chunk=8))
    run_all(engine, [make_request("a", range(40), max_tokens=30)])


def test_windowed_pool_smaller_than_a_chunk_shortens_the_chunk():
    groups = [CacheGroup("full", None, 32), CacheGroup("window", 6, 3)]
    engine = FakeEngine(make_scheduler(groups, prefill_chunk=16))
    run_all(engine, [make_request("a", range(40), max_tokens=30)])


class TestRefusals:
    def test_prompt_as_long_as_the_context(self):
        """U12."""
        with pytest.raises(InvalidRequestError, match="100 tokens and max_model_len is 100"):
            make_scheduler().add(make_request("a", range(100)))

    def test_empty_prompt(self):
        with pytest.raises(InvalidRequestError, match="no tokens"):
            make_scheduler().add(make_request("a", []))

    def test_answer_that_exceeds_the_context_if_the_user_set_it(self):
        with pytest.raises(InvalidRequestError, match="max_tokens may be at most 10"):
            make_scheduler().add(make_request("a", range(90), max_tokens=11))

    def test_answer_left_open_is_bounded_by_the_context(self):
        request = make_request("a", range(90), params=SamplingParams(max_tokens=None), max_tokens=10**6)
        make_scheduler().add(request)
        assert request.max_tokens == 10

    def test_request_that_never_fits_the_pool_names_the_sizes(self):
        scheduler = make_scheduler([CacheGroup("full", None, 5)])
        with pytest.raises(
            InvalidRequestError, match=r"hold 20 \(pages of 4 tokens: full 5\); max_tokens may be at most 6"
        ):
            scheduler.add(make_request("a", range(15), max_tokens=7))
        scheduler.add(make_request("b", range(15), max_tokens=6))

    def test_prompt_that_never_fits_the_pool(self):
        with pytest.raises(InvalidRequestError, match="shorten the prompt"):
            make_scheduler([CacheGroup("full", None, 5)]).add(make_request("a", range(21), max_tokens=1))

    def test_answer_left_open_is_bounded_by_the_pool(self):
        engine = FakeEngine(make_scheduler([CacheGroup("full", None, 5)]))
        request = make_request("a", range(15), params=SamplingParams(max_tokens=None), max_tokens=10**6)
        run_all(engine, [request])
        assert len(request.output_ids) == 6

    def test_window_bounds_what_a_long_request_needs(self):
        engine = FakeEngine(make_scheduler([CacheGroup("window", 8, 4)]))
        run_all(engine, [make_request("a", range(60), max_tokens=20)])

    def test_id_in_use(self):
        scheduler = make_scheduler()
        scheduler.add(make_request("a", [1]))
        with pytest.raises(InvalidRequestError, match="'a' is in use"):
            scheduler.add(make_request("a", [2]))

    def test_queue_limit(self):
        scheduler = make_scheduler(max_waiting=1)
        scheduler.add(make_request("a", [1]))
        with pytest.raises(QueueFullError, match="1 requests are waiting"):
            scheduler.add(make_request("b", [2]))
        scheduler.schedule()
        scheduler.add(make_request("c", [3]))


@pytest.mark.parametrize("context", [40, 4000])
def test_a_steady_step_reads_each_token_once_whatever_the_context(monkeypatch, context):
    groups = [CacheGroup("full", None, 2100), CacheGroup("window", 16, 200)]
    scheduler = make_scheduler(groups, max_batch_tokens=5000, prefill_chunk=4900, max_model_len=5000)
    for i in range(2):
        scheduler.add(make_request(i, [i + 1] * context, max_tokens=100))
    plan = scheduler.schedule()
    while plan.num_decode < 2:
        for row in plan.rows:
            scheduler.complete(row, [1] if row.samples else [])
        plan = scheduler.schedule()
    reads, updates, real = [], 0, Request.token
    monkeypatch.setattr(Request, "token", lambda self, position: reads.append(position) or real(self, position))
    for _ in range(40):
        for row in plan.rows:
            scheduler.complete(row, [1])
        plan = scheduler.schedule()
        updates += len(plan.page_updates)
    assert len(reads) <= 2 * 44
    assert len(set(reads)) * 2 >= len(reads)
    assert updates <= 2 * 2 * 11


def test_a_small_window_pool_still_lets_requests_run_together():
    groups = [CacheGroup("full", None, 60), CacheGroup("window", 6, 6)]
    engine = FakeEngine(make_scheduler(groups, prefill_chunk=16))
    run_all(engine, [make_request(i, [i + 1] * 40, max_tokens=20) for i in range(2)])
    assert max(len(plan.rows) for plan in engine.plans) == 2

"""Room for a prompt that another pool computes: all of it or nothing, and given back wherever the request ends."""

from fake_device import make_request, make_scheduler

from trillion_infer.config.cache import CacheGroup
from trillion_infer.core.request import Status

PAGES = [CacheGroup("full", None, 8)]


def reserved(scheduler, name, tokens, **options):
    request = make_request(name, range(tokens), **options)
    return request, scheduler.reserve(request, tokens - 1, by_growth=True)


def test_a_reservation_is_whole_or_nothing_p08():
    """Two requests can never each hold half of what they need."""
    scheduler = make_scheduler(groups=PAGES, page_size=4)
    _, first = reserved(scheduler, "a", 20, max_tokens=1)
    free = scheduler.cache.groups[0].pool.available
    other = make_request("b", range(100, 120), max_tokens=1)
    assert first == 0
    assert scheduler.reserve(other, 19, by_growth=True) is None
    assert (scheduler.cache.groups[0].pool.available, other.slot) == (free, -1)


def test_a_window_is_reserved_and_not_what_lies_before_it():
    groups = [CacheGroup("full", None, 40), CacheGroup("window", 8, 6)]
    scheduler = make_scheduler(groups=groups, page_size=4)
    request, hit = reserved(scheduler, "a", 101, max_tokens=1)
    full, window = scheduler.cache.held(request)
    assert (hit, full.first, full.end) == (0, 0, 26)
    assert (window.first, window.end) == (23, 26)


def test_the_answers_of_others_are_left_room_to_grow_p16():
    scheduler = make_scheduler(groups=PAGES, page_size=4, expected_output=12)
    first, _ = reserved(scheduler, "a", 9, max_tokens=12)
    scheduler.activate(first, 8)
    grows = make_request("b", range(100, 113), max_tokens=12)
    assert scheduler.reserve(grows, 12, by_growth=True) is None
    assert scheduler.reserve(grows, 12) is not None


def test_a_reservation_that_is_given_back_leaves_nothing():
    scheduler = make_scheduler(groups=PAGES, page_size=4)
    request, _ = reserved(scheduler, "a", 20, max_tokens=1)
    scheduler.unreserve(request)
    scheduler.check_integrity()
    assert scheduler.cache.groups[0].pool.num_leased == 0
    scheduler.add(request)
    assert scheduler.schedule() is not None


def test_a_request_that_starts_while_reservations_hold_all_pages_is_admitted_by_the_plan_that_runs_it():
    scheduler = make_scheduler(groups=PAGES, page_size=4)
    first, _ = reserved(scheduler, "a", 32, max_tokens=1)
    late = make_request("b", range(100, 106), max_tokens=1)
    scheduler.add(late)
    assert scheduler.schedule() is None
    scheduler.unreserve(first)
    plan = scheduler.schedule()
    assert plan is not None
    assert ([row.request for row in plan.rows], plan.admitted) == ([late], [late])


def test_an_active_reservation_computes_its_last_token_alone():
    scheduler = make_scheduler(groups=PAGES, page_size=4)
    request, _ = reserved(scheduler, "a", 10, max_tokens=3)
    assert scheduler.schedule() is None
    scheduler.activate(request, 9)
    plan = scheduler.schedule()
    assert [(row.start, row.length, row.samples) for row in plan.rows] == [(9, 1, True)]
    assert plan.admitted == [request]
    scheduler.check_integrity()


def test_pages_of_a_computed_prompt_stay_until_they_are_given_back():
    scheduler = make_scheduler(groups=PAGES, page_size=4)
    request = make_request("a", range(10), max_tokens=1)
    scheduler.add(request)
    scheduler.schedule()
    scheduler.cache.detach(request, "key")
    scheduler.finish(request, Status.FINISHED_LENGTH)
    pool = scheduler.cache.groups[0].pool
    assert (pool.num_leased, scheduler.cache.num_detached) == (3, 1)
    scheduler.check_integrity()
    scheduler.cache.release_detached("key")
    scheduler.cache.release_detached("key")
    assert pool.num_leased == 0
    scheduler.check_integrity()

"""Draft lengths maximise tokens per second by what was measured, and are 0 where drafts do not pay."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trillion_infer.speculate import Acceptance, Draft, StepCost, allot
from trillion_infer.speculate.adaptive import can_pay
from trillion_infer.speculate.stats import SpeculationStats


def measured(costs):
    cost = StepCost(list(costs))
    for tokens, seconds in costs.items():
        cost.record(tokens, seconds)
    return cost


def test_free_verification_takes_every_draft():
    assert allot([[0.5, 0.4], [0.3]], 2, measured({2: 1.0, 8: 1.0})) == [2, 1]


def test_dear_verification_takes_none():
    assert allot([[0.9, 0.8]] * 4, 4, measured({4: 1.0, 8: 2.0, 16: 4.0})) == [0] * 4


def test_the_likeliest_drafts_fill_the_bucket():
    assert allot([[0.9, 0.8, 0.1], [0.2], [0.95]], 3, measured({3: 1.0, 6: 1.2, 16: 9.0})) == [2, 0, 1]


def test_nothing_measured_nothing_drafted():
    assert allot([[0.9]], 1, StepCost([1, 2])) == [0]
    assert allot([], 0, StepCost([1, 2])) == []


def test_an_unmeasured_size_is_tried_and_then_known():
    cost = StepCost([1, 4])
    cost.record(1, 1.0)
    assert allot([[0.5]], 1, cost) == [1]
    cost.record(2, 3.0)
    assert allot([[0.5]], 1, cost) == [0]


@given(
    limits=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    seconds=st.lists(st.floats(0.1, 3.0), min_size=4, max_size=4).map(sorted),
)
def test_drafts_can_pay_exactly_where_certain_ones_would_be_taken(limits, seconds):
    cost = measured(dict(zip((1, 4, 8, 24), seconds, strict=True)))
    assert can_pay(limits, len(limits), cost) == any(allot([[1.0] * limit for limit in limits], len(limits), cost))


falling = st.lists(st.floats(0.01, 0.99), max_size=3).map(lambda p: list(itertools.accumulate(p, lambda a, b: a * b)))


@given(
    chances=st.lists(falling, min_size=1, max_size=3),
    seconds=st.lists(st.floats(0.1, 3.0), min_size=4, max_size=4).map(sorted),
)
def test_no_other_lengths_give_more_tokens_per_second(chances, seconds):
    cost = measured(dict(zip((1, 3, 6, 12), seconds, strict=True)))
    base = len(chances)

    def speed(lengths):
        gained = base + sum(sum(each[:length]) for each, length in zip(chances, lengths, strict=True))
        return gained / cost.estimate(base + sum(lengths))

    best = max(map(speed, itertools.product(*(range(len(each) + 1) for each in chances))))
    chosen = allot(chances, base, cost, margin=1.0)
    assert speed(chosen) == pytest.approx(best)


def test_cost_follows_the_newest_steps():
    cost = measured({4: 1.0})
    for _ in range(50):
        cost.record(3, 2.0)
    assert cost.estimate(4) == pytest.approx(2.0, rel=1e-3)


def test_acceptance_learns_and_recovers():
    acceptance, draft = Acceptance(), Draft((1, 2), (0.8, 0.8), "ngram")
    assert acceptance.chances("r", draft) == pytest.approx([0.8, 0.64])
    for _ in range(30):
        acceptance.record("r", draft, 0)
    low, other = (acceptance.chances(request, draft)[0] for request in ("r", "other"))
    assert low < 0.05
    assert low < other < 0.2, "of other requests such drafts are thought less likely, too"
    for _ in range(300):
        acceptance.rest("r", "ngram")
    assert acceptance.chances("r", draft)[0] > 0.9 * other
    acceptance.release("r")
    assert acceptance.factor("r", "ngram") == 1.0


def test_acceptance_settles_at_what_happens():
    acceptance, draft = Acceptance(), Draft((1,), (0.5,), "ngram")
    for step in range(400):
        acceptance.record("r", draft, int(step % 4 == 0))
    assert 0.1 < acceptance.chances("r", draft)[0] < 0.45


def test_what_a_drafter_says_is_corrected_by_what_stood_in_all_requests():
    acceptance, draft = Acceptance(), Draft((1, 2), (0.9, 0.5), "ngram")
    for request in range(100):
        acceptance.record(request, draft, 1)
        acceptance.release(request)
    first, both = acceptance.chances("new", draft)
    assert first > 0.97
    assert both < 0.05
    assert acceptance.chances("new", Draft((1,), (0.5,), "suffix")) == [0.5]


def test_stats_say_what_stood():
    stats = SpeculationStats()
    for accepted in (3, 0, 1):
        stats.record(Draft((1, 2, 3), (0.9,) * 3, "suffix"), accepted)
    stats.record(Draft(), 0)
    suffix = stats.by_drafter["suffix"]
    assert (suffix.drafts, suffix.drafted, suffix.accepted) == (3, 9, 4)
    assert suffix.acceptance_rate == pytest.approx(4 / 9)
    assert suffix.acceptance_length == pytest.approx(1 + 4 / 3)

"""The learned length of answers."""

from hypothesis import given
from hypothesis import strategies as st

from trillion_infer.schedule.estimate import OutputLengths


def test_prior_holds_until_something_finished():
    assert OutputLengths(100).expected(0, 1000) == 100


def test_many_short_answers_outweigh_the_prior():
    lengths = OutputLengths(100)
    for _ in range(200):
        lengths.record(10)
    assert lengths.expected(0, 1000) <= 12


def test_an_answer_longer_than_all_seen_is_expected_to_double():
    lengths = OutputLengths(100)
    lengths.record(10)
    assert lengths.expected(300, 1000) == 600


@given(st.lists(st.integers(0, 500), max_size=600), st.integers(1, 300), st.integers(0, 600), st.integers(1, 1000))
def test_expectation_is_beyond_what_is_there_and_within_the_limit(finished, prior, so_far, limit):
    lengths = OutputLengths(prior)
    for length in finished:
        lengths.record(length)
    expected = lengths.expected(so_far, limit)
    assert expected <= limit
    assert expected > so_far or expected == limit


@given(st.lists(st.integers(0, 500), min_size=300, max_size=600), st.integers(0, 500))
def test_expectation_is_the_mean_of_the_recent_longer_ones(finished, so_far):
    lengths = OutputLengths(1)
    for length in finished:
        lengths.record(length)
    longer = [n for n in finished[-OutputLengths.MEMORY :] if n > so_far]
    prior = [1] * OutputLengths.PRIOR_WEIGHT if so_far < 1 else []
    values = longer + prior
    mean = -(-sum(values) // len(values)) if values else 2 * so_far
    assert lengths.expected(so_far, 10**6) == max(mean, so_far + 1)

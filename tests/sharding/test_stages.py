"""Cuts of a chain of layers into pipeline stages."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding.stages import balanced_cuts


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.data())
def test_no_other_cut_has_a_cheaper_worst_stage(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    cuts = balanced_cuts(costs, stages)
    assert (cuts[0], cuts[-1], len(cuts)) == (0, len(costs), stages + 1)

    def worst(cut):
        return max(sum(costs[start:stop]) for start, stop in pairwise(cut))

    every = ((0, *inner, len(costs)) for inner in combinations(range(1, len(costs)), stages - 1))
    assert worst(cuts) == min(map(worst, every))


def test_equal_layers_are_spread_evenly():
    sizes = sorted(stop - start for start, stop in pairwise(balanced_cuts([1.0] * 10, 4)))
    assert sizes == [2, 2, 3, 3]


def test_an_empty_stage_is_refused():
    with pytest.raises(ValueError, match="3 items cannot be cut into 4 stages; at most 3"):
        balanced_cuts([1, 1, 1], 4)

"""The order in which policies give blocks up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trillion_infer.cache.eviction import POLICIES, Block, LeastValuable, make_policy
from trillion_infer.core.errors import ConfigError


def block(number, **fields):
    return Block(bytes([number]), number, 0, **fields)


def fill(policy, *blocks):
    for each in blocks:
        policy.insert(each)


def order(policy):
    return [policy.evict().page for _ in range(len(policy))]


@pytest.mark.parametrize("name", POLICIES)
@given(data=st.data())
def test_every_evictable_block_is_given_up_exactly_once(name, data):
    policy, inside = make_policy(name), set()
    for number in range(data.draw(st.integers(1, 30))):
        fields = {"hits": data.draw(st.integers(0, 2)), "superseded": data.draw(st.booleans())}
        fresh = block(number, **fields, pins=data.draw(st.integers(0, 1)))
        policy.insert(fresh)
        inside.add(fresh)
        if data.draw(st.booleans()):
            left = data.draw(st.sampled_from(sorted(inside, key=lambda b: b.page)))
            policy.remove(left)
            inside.remove(left)
        assert set(policy) == inside
        assert len(policy) == len(inside)
    assert sorted(order(policy)) == sorted(b.page for b in inside)


def test_without_history_the_value_order_is_that_of_release():
    policy = LeastValuable()
    fill(policy, block(1), block(2), block(3))
    assert order(policy) == [1, 2, 3]


def test_hit_blocks_outlive_fresh_ones_by_half():
    policy = LeastValuable()
    fill(policy, block(0, hits=1), *(block(n) for n in range(1, 10)))
    assert order(policy) == [1, 2, 3, 0, 4, 5, 6, 7, 8, 9]


def test_superseded_first_and_pinned_last():
    policy = LeastValuable()
    fill(policy, block(1, pins=1), block(2), block(3, superseded=True))
    assert order(policy) == [3, 2, 1]


def test_unpinned_block_counts_as_just_used():
    policy = LeastValuable()
    pinned = block(1, pins=1)
    fill(policy, pinned, block(2))
    pinned.pins = 0
    policy.revalue(pinned)
    assert order(policy) == [2, 1]


def test_unknown_policy_names_the_choices():
    with pytest.raises(ConfigError, match="'fifo' is unknown; choose one of value, lru"):
        make_policy("fifo")

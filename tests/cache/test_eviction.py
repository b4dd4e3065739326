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
        fields = {"growth": data.draw(st.integers(0, 9)), "superseded": data.draw(st.booleans())}
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


def come_back(policy, after):
    """A prompt ends, `after` blocks are given back by others, and its next turn ends."""
    policy.growth([b"turn"], 1, 0)
    others = [block(100 + n) for n in range(after)]
    fill(policy, *others)
    policy.growth([b"turn", b"next"], 2, 0)
    for other in others:
        policy.remove(other)


def test_large_growth_counts_as_age_in_units_of_the_time_until_return():
    policy = LeastValuable()
    come_back(policy, after=10)
    fill(policy, block(0), *(block(n) for n in range(1, 10)), block(10, growth=3))  # ln(4) / 2 of 10 is 6.9
    assert order(policy) == [0, 1, 2, 3, 10, 4, 5, 6, 7, 8, 9]


def test_growth_counts_from_what_was_found_or_the_last_prompt_known():
    policy, names = LeastValuable(), [bytes([n]) for n in range(9)]
    assert policy.growth(names[:4], 3, 1) == 3
    assert policy.growth(names[:8], 7, 0) == 5  # its blocks are gone, and it is known that the prompt had three
    assert policy.growth(names, 8, 8) == 1


def test_ends_of_prompts_are_remembered_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(LeastValuable, "MAX_ENDS", 2)
    policy = LeastValuable()
    for end in b"abc":
        policy.growth([bytes([end])], 1, 0)
    assert [policy.growth([bytes([end]), b"more"], 1, 0) for end in b"ac"] == [2, 1]


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

"""The host tier: what goes in comes out, intact, within the budget."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.cache.tiers.helpers import MODEL, SIZE, block, blocks, bytes_of, key_of
from trillion_infer.cache.tiers.host import HostTier


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60), st.integers(1, 6))
def test_answers_are_the_stored_bytes_and_the_budget_holds(actions, capacity):
    tier = HostTier(MODEL, capacity * SIZE)
    for is_put, number in actions:
        if is_put:
            left = tier.put([block(number)])
            assert all(other.key not in tier for other in left)
            assert tier.get(key_of(number)) == bytes_of(key_of(number))
        else:
            assert tier.get(key_of(number)) in (None, bytes_of(key_of(number)))
        assert tier.used == tier.num_blocks * SIZE <= capacity * SIZE


def test_the_least_recently_used_block_is_handed_on():
    tier = HostTier(MODEL, 2 * SIZE)
    tier.put(blocks(1, 2))
    assert tier.get(key_of(1)) is not None
    assert [b.key for b in tier.put(blocks(3))] == [key_of(2)]
    assert tier.stats()["evictions"] == 1


def test_the_parts_of_a_block_leave_together():
    """However they were used: parts are read one after the other, those of all blocks together."""
    tier = HostTier(MODEL, 6 * SIZE)
    tier.put([block(number, part=part) for number in range(3) for part in range(2)])
    for part in range(2):
        for number in range(3):
            assert tier.get(key_of(number, part=part)) is not None
    assert [b.key for b in tier.put(blocks(9))] == [key_of(0, part=0), key_of(0, part=1)]
    assert tier.used == tier.num_blocks * SIZE == 5 * SIZE


def test_a_flipped_bit_is_a_miss_and_counted():
    tier = HostTier(MODEL, 10 * SIZE)
    good = block(1)
    tier.put([replace(good, data=bytes([good.data[0] ^ 1]) + good.data[1:])])
    assert tier.get(good.key) is None
    assert good.key not in tier
    assert tier.used == 0
    assert tier.stats()["digest_failures"] == 1


def test_another_blocks_bytes_are_a_miss():
    tier = HostTier(MODEL, 10 * SIZE)
    tier.put([replace(block(1), key=key_of(2))])
    assert tier.get(key_of(2)) is None


def test_a_block_larger_than_the_budget_is_handed_on():
    tier = HostTier(MODEL, SIZE - 1)
    assert tier.put(blocks(1)) == blocks(1)


def test_thousands_of_blocks_past_full_k10():
    tier = HostTier(MODEL, 7 * SIZE)
    for number in range(3000):
        tier.put([block(number), block(number, group=1)])
        assert tier.used <= tier.budget
    stats = tier.stats()
    assert stats["stored"] - stats["evictions"] == stats["blocks"] == 7

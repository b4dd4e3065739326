"""Page pool: reference counts, eviction, and the states of a page."""

import pytest

from trillion_infer.cache.eviction import Block
from trillion_infer.cache.pages import PagePool
from trillion_infer.core.errors import OutOfMemoryError


def cached(pool, name):
    """A page that holds a named block and nobody."""
    block = Block(name, pool.lease(), 0)
    pool.release(block.page, block)
    return block


def test_pages_are_distinct_until_the_pool_is_empty():
    pool = PagePool(5)
    assert sorted(pool.lease() for _ in range(5)) == [0, 1, 2, 3, 4]
    with pytest.raises(OutOfMemoryError, match="All 5 pages"):
        pool.lease()
    pool.check_integrity()


def test_unnamed_page_becomes_free_and_named_page_stays_cached():
    pool = PagePool(2)
    pool.release(pool.lease(), None)
    cached(pool, b"a")
    assert (pool.num_free, pool.num_cached, pool.num_leased) == (1, 1, 0)


def test_page_with_two_holders_stays_leased_until_both_have_gone():
    pool = PagePool(1)
    block = cached(pool, b"a")
    pool.share(block)
    pool.share(block)
    pool.release(block.page, block)
    assert pool.num_leased == 1
    pool.release(block.page, block)
    assert pool.num_cached == 1
    pool.check_integrity()


def test_least_recently_used_block_goes_first_and_is_reported():
    gone = []
    pool = PagePool(3, on_evict=gone.append)
    first, second, third = (cached(pool, name) for name in (b"a", b"b", b"c"))
    pool.share(first)
    pool.release(first.page, first)
    assert pool.lease() == second.page
    assert pool.lease() == third.page
    assert gone == [second, third]
    assert pool.evictions == 2


def test_free_pages_are_used_before_cached_ones():
    pool = PagePool(2)
    block = cached(pool, b"a")
    assert pool.lease() != block.page
    assert pool.evictions == 0


def test_shared_block_is_not_evicted():
    pool = PagePool(2)
    block = cached(pool, b"a")
    pool.share(block)
    pool.lease()
    assert pool.available == 0


def test_integrity_check_notices_a_lost_page():
    pool = PagePool(2)
    pool._free.pop()
    with pytest.raises(AssertionError, match="is not 2"):
        pool.check_integrity()

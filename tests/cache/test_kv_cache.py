"""What the cache finds, shares, keeps and gives back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trillion_infer.cache.kv_cache import KVCache
from trillion_infer.cache.naming import BlockNamer
from trillion_infer.config.cache import CacheGroup
from trillion_infer.core.errors import ConfigError
from trillion_infer.core.request import Request
from trillion_infer.core.sampling_params import SamplingParams

PAGE = 4
FULL = CacheGroup("full", None, 40)


def make(*groups, **options) -> KVCache:
    return KVCache(groups or (FULL,), PAGE, BlockNamer(b"m", b"l", PAGE), **options)


def request(prompt, slot=0, **fields) -> Request:
    made = Request("r", list(prompt), fields.pop("params", SamplingParams()), 16, **fields)
    made.slot = slot
    return made


def compute(cache, prompt, chunk=1000, **fields) -> Request:
    """A request whose prompt has been computed in chunks, every page committed."""
    made = request(prompt, **fields)
    made.num_computed = cache.match(made)
    cache.attach(made, made.num_computed)
    while made.num_computed < made.num_known:
        upto = min(made.num_known, made.num_computed + chunk)
        assert cache.allocate(made, upto)
        made.num_computed = upto
        cache.commit(made)
    return made


def leave(cache, prompt, **fields) -> None:
    cache.release(compute(cache, prompt, **fields))


class TestMatch:
    def test_only_whole_blocks_of_known_computed_tokens_are_found(self):
        cache = make()
        leave(cache, range(10))
        assert cache.match(request(range(20))) == 8

    def test_at_least_one_token_is_left_to_compute(self):
        cache = make()
        leave(cache, range(8))
        assert cache.match(request(range(8))) == 4
        assert cache.match(request(range(9))) == 8

    @given(st.lists(st.integers(0, 1), min_size=1, max_size=24), st.lists(st.integers(0, 1), min_size=1, max_size=24))
    def test_match_is_the_common_prefix_in_whole_pages(self, one, other):
        cache = make()
        leave(cache, one)
        common = next(
            (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
        )
        assert cache.match(request(other)) == min(common, len(other) - 1) // PAGE * PAGE

    @pytest.mark.parametrize("field", ["cache_salt", "adapter"])
    def test_tenants_and_adapters_do_not_share_k01(self, field):
        cache = make()
        leave(cache, range(10), **{field: "one"})
        assert cache.match(request(range(10), **{field: "other"})) == 0
        assert cache.match(request(range(10), **{field: "one"})) == 8

    def test_prompt_logprobs_find_nothing(self):
        cache = make()
        leave(cache, range(10))
        assert cache.match(request(range(10), params=SamplingParams(prompt_logprobs=0))) == 0

    def test_switched_off_finds_nothing_and_caches_nothing(self):
        cache = make(enable_prefix=False)
        leave(cache, range(10))
        assert cache.match(request(range(10))) == 0
        assert cache.groups[0].pool.num_free == FULL.num_pages

    def test_state_that_cannot_be_reused_from_a_prefix_is_recomputed(self):
        """K11."""
        cache = make(FULL, CacheGroup("recurrent", None, 40, reusable=False))
        leave(cache, range(10))
        assert cache.match(request(range(10))) == 0

    def test_match_has_no_side_effect_on_pages(self):
        cache = make()
        leave(cache, range(10))
        before = cache.stats()
        cache.match(request(range(10)))
        assert cache.stats() == before

    def test_pages_in_use_are_found_too(self):
        cache = make()
        compute(cache, range(12))
        assert cache.match(request(range(12))) == 8


class TestWindows:
    def test_hit_needs_only_the_window(self):
        cache = make(FULL, CacheGroup("window", 5, 40))
        leave(cache, range(41), chunk=4)
        window = cache.groups[1]
        for block in list(window.pool.cached_blocks()):
            if block.depth < 9:
                window.pool.forget(block)
                window.index.drop(block)
        assert cache.match(request(range(41))) == 40

    def test_hit_is_shortened_to_where_the_window_is_complete(self):
        cache = make(FULL, CacheGroup("window", 5, 40))
        leave(cache, range(41), chunk=4)
        window = cache.groups[1]
        block = next(b for b in window.pool.cached_blocks() if b.depth == 9)
        window.pool.forget(block)
        window.index.drop(block)
        assert cache.match(request(range(41))) == 36

    def test_pages_that_left_the_window_are_given_back(self):
        cache = make(CacheGroup("window", 6, 40))
        made = compute(cache, range(40), chunk=2)
        assert cache.pages_held(made)[0] <= cache.groups[0].group.pages_for(40, 2, PAGE) == 3

    def test_window_survives_its_request_in_the_index(self):
        cache = make(CacheGroup("window", 6, 40))
        leave(cache, range(20), chunk=4)
        assert cache.match(request(range(20))) == 16
        made = compute(cache, range(20))
        assert cache.held(made)[0].first == 2

    def test_chunked_attention_needs_nothing_at_a_chunk_border(self):
        group = CacheGroup("chunked", None, 40, chunk=8)
        assert [group.first_visible(i) for i in (0, 7, 8, 15, 16)] == [0, 0, 8, 8, 16]
        cache = make(FULL, group)
        leave(cache, range(17), chunk=4)
        cache.groups[1].clear()
        assert cache.match(request(range(17))) == 16
        assert cache.match(request(range(16))) == 8

    @given(st.integers(1, 20), st.integers(1, 8), st.integers(1, 60), st.booleans(), st.sampled_from([1, 4, 16]))
    def test_page_bound_holds_at_every_step_and_is_reached(self, reach, extend, length, chunked, page):
        group = CacheGroup("g", None if chunked else reach, 1, chunk=reach if chunked else None)
        bound = group.pages_for(length, extend, page)
        most = 0
        for start in range(length):
            end = min(length, start + extend)
            most = max(most, (end - 1) // page - group.first_visible(start) // page + 1)
        assert most <= bound
        assert chunked or length < reach + extend + page or most >= bound - 1


class TestPages:
    def test_all_groups_or_nothing(self):
        cache = make(FULL, CacheGroup("small", None, 2))
        made = request(range(20))
        cache.attach(made, 0)
        assert not cache.allocate(made, 9)
        assert cache.pages_held(made) == [0, 0]
        assert cache.fit(made, 9) == 8
        assert cache.allocate(made, 8)
        assert cache.pages_held(made) == [2, 2]

    def test_table_updates_name_group_slot_block_and_page_once(self):
        cache = make(FULL, CacheGroup("other", None, 40))
        made = request(range(6), slot=3)
        cache.attach(made, 0)
        cache.allocate(made, 6)
        updates = cache.drain_updates()
        pages = [held.pages for held in cache.held(made)]
        assert sorted(updates) == sorted((g, 3, b, pages[g][b]) for g in (0, 1) for b in (0, 1))
        assert cache.drain_updates() == []

    def test_later_update_of_an_entry_wins(self):
        cache = make()
        made = request(range(6))
        cache.attach(made, 0)
        cache.allocate(made, 6)
        cache.rewind(made, 0)
        other = request(range(6), slot=1)
        cache.attach(other, 0)
        cache.allocate(other, 2)
        cache.allocate(made, 3)
        tables = {update[:3]: update[3] for update in cache.drain_updates()}
        assert tables[0, 0, 0] == cache.held(made)[0].pages[0] != cache.held(other)[0].pages[0]

    def test_rewind_gives_back_pages_beyond_and_keeps_the_partial_one(self):
        cache = make()
        made = request(range(20))
        cache.attach(made, 0)
        cache.allocate(made, 20)
        cache.rewind(made, 9)
        assert cache.pages_held(made) == [3]

    def test_release_keeps_full_known_blocks_and_frees_the_partial_one(self):
        cache = make()
        leave(cache, range(10))
        pool = cache.groups[0].pool
        assert (pool.num_cached, pool.num_leased) == (2, 0)
        cache.check_integrity()

    def test_release_twice_is_harmless(self):
        cache = make()
        made = compute(cache, range(10))
        cache.release(made)
        cache.release(made)
        cache.check_integrity()

    def test_tokens_not_known_yet_are_not_named(self):
        cache = make()
        made = compute(cache, range(7))
        made.num_in_flight = 1
        cache.allocate(made, 8)
        made.num_computed = 8
        cache.commit(made)
        assert len(cache.groups[0].index) == 1
        made.output_ids.append(5)
        cache.commit(made)
        assert cache.match(request([*range(7), 5, 0])) == 8

    def test_equal_blocks_computed_twice_are_named_once(self):
        cache = make()
        one, other = request(range(9)), request(range(9), slot=1)
        for made in (one, other):
            cache.attach(made, 0)
            cache.allocate(made, 9)
            made.num_computed = 9
        cache.commit(one)
        cache.commit(other)
        cache.release(one)
        cache.release(other)
        pool = cache.groups[0].pool
        assert (pool.num_cached, pool.num_free) == (2, 38)
        cache.check_integrity()

    def test_deepest_block_is_evicted_first(self):
        cache = make(CacheGroup("full", None, 5))
        leave(cache, range(17))
        compute(cache, range(100, 105))
        assert cache.match(request(range(17))) == 12

    def test_clear_forgets_what_nobody_holds(self):
        cache = make()
        leave(cache, range(10))
        held = compute(cache, range(50, 60))
        cache.clear()
        assert cache.match(request(range(10))) == 0
        assert cache.match(request(range(50, 60))) == 8
        cache.release(held)
        cache.check_integrity()

    def test_hits_are_counted_in_tokens(self):
        cache = make()
        leave(cache, range(10))
        leave(cache, range(10))
        stats = cache.stats()
        assert (stats["prefix_lookup_tokens"], stats["prefix_hit_tokens"]) == (20, 8)


class TestAwaiting:
    def test_block_is_awaited_while_its_request_computes_it(self):
        cache = make()
        first = request(range(10))
        cache.attach(first, 0)
        name = cache.awaited(request(range(10)))
        assert cache.is_computing(name)
        cache.allocate(first, 10)
        first.num_computed = 10
        cache.commit(first)
        assert not cache.is_computing(name)

    def test_nobody_waits_for_a_request_that_is_gone(self):
        cache = make()
        first = request(range(10))
        cache.attach(first, 0)
        cache.release(first)
        assert cache.awaited(request(range(10))) is None


@pytest.mark.parametrize(
    ("groups", "page_size", "message"),
    [
        ([], 4, "at least one"),
        ([FULL, FULL], 4, "distinct names"),
        ([FULL], 8, "must be equal"),
    ],
)
def test_contradictory_set_up_is_refused(groups, page_size, message):
    with pytest.raises(ConfigError, match=message):
        KVCache(groups, page_size, BlockNamer(b"", b"", 4))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window": 4, "chunk": 4}, "at most one"),
        ({"window": 0}, "window 0"),
        ({"window": None, "num_pages": 0}, "0 pages"),
    ],
)
def test_impossible_group_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        CacheGroup(**{"name": "g", "window": None, "num_pages": 4, **fields})


class TestEvictionHints:
    def test_branch_left_behind_is_evicted_before_older_blocks(self):
        cache = make(CacheGroup("full", None, 8))
        leave(cache, range(50, 59))
        leave(cache, [*range(8), 20, 20, 20, 20, 0])
        leave(cache, [*range(8), 21, 21, 21, 21, 0])
        compute(cache, range(70, 82))
        assert cache.match(request([*range(8), 20, 20, 20, 20, 0])) == 8
        assert cache.match(request(range(50, 59))) == 8
        cache.check_integrity()

    def test_branches_of_a_popular_prefix_live_side_by_side(self):
        cache = make()
        for tail in range(20):
            leave(cache, [*range(8), *[30 + tail] * 5])
        blocks = list(cache.groups[0].pool.cached_blocks())
        assert sum(block.superseded for block in blocks) < 12

    def test_pinned_blocks_go_last_and_yield_when_nothing_else_is_left(self):
        cache = make(CacheGroup("full", None, 4))
        kept = compute(cache, range(9))
        cache.pin(kept.block_names)
        cache.release(kept)
        leave(cache, range(50, 55))
        made = request(range(80, 96))
        cache.attach(made, 0)
        cache.allocate(made, 8)
        assert cache.match(request(range(9))) == 8
        assert cache.allocate(made, 16)
        cache.check_integrity()

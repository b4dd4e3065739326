"""The KV cache of one model: for every request, the pages of every cache group, and the prefixes worth keeping."""

from collections.abc import Callable, Sequence

from trillion_infer.cache.eviction import EvictionPolicy, LeastValuable
from trillion_infer.cache.group import GroupPages, HeldPages, has_room
from trillion_infer.cache.naming import BlockNamer
from trillion_infer.config.cache import CacheGroup
from trillion_infer.core.errors import ConfigError
from trillion_infer.core.request import Request

PageUpdate = tuple[int, int, int, int]
"""(group number, slot, block number, page): page_table[group][slot][block] becomes page."""


class KVCache:
    """Page accounting over all groups. Writes `Request.block_names`; reads its ids, slot and num_computed.

    Device steps run in the order in which they are planned, so a page may be named, shared or given away as soon as
    the last step that touches it has been sent.

    groups: at least one, with distinct names; group numbers follow this order.
    page_size: positions a page, the same for all groups.
    namer: block identity, made for the same page size.
    policy: makes the eviction policy of each group.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        page_size: int,
        namer: BlockNamer,
        enable_prefix: bool = True,
        policy: Callable[[], EvictionPolicy] = LeastValuable,
    ):
        names = [group.name for group in groups]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"Cache groups are named {names}; give at least one, with distinct names.")
        if page_size < 1 or namer.page_size != page_size:
            raise ConfigError(
                f"page_size is {page_size} and the block namer's is {namer.page_size}; they must be equal, at least 1."
            )
        self.page_size = page_size
        self.enable_prefix = enable_prefix and all(group.reusable for group in groups)
        self.groups = [GroupPages(group, page_size, policy()) for group in groups]
        self._namer = namer
        self._committed: dict[Request, int] = {}
        self._detached: set[str] = set()
        self._computing: dict[bytes, Request] = {}
        self._updates: dict[tuple[int, int, int], int] = {}
        self._lookups = self._lookup_tokens = self._hit_tokens = 0

    # Prefixes

    def match(self, request: Request) -> int:
        """Tokens of the longest prefix whose pages can be taken over: a multiple of page_size, at most num_known - 1.

        0 for requests that want prompt log-probabilities: those need every position computed. Changes no state.
        """
        limit = self._matchable_blocks(request)
        names = self._names(request, limit)
        for group in self.groups:
            if group.group.is_full:
                limit = group.index.run_length(names, limit)
        usable = [group.longest_usable(names, limit) for group in self.groups if not group.group.is_full]
        while limit and not all(flags[limit] for flags in usable):
            limit -= 1
        return limit * self.page_size

    def matchable_names(self, request: Request) -> list[bytes]:
        """Names of the blocks that `request` could take over if they were present, the first block first."""
        limit = self._matchable_blocks(request)
        return self._names(request, limit)[:limit]

    def awaited(self, request: Request) -> bytes | None:
        """Name of the deepest block that `request` could take over once another request has computed it."""
        limit = self._matchable_blocks(request)
        names = self._names(request, limit)
        return next((name for name in reversed(names[:limit]) if name in self._computing), None)

    def is_computing(self, name: bytes) -> bool:
        """A request with pages is on its way to computing this block."""
        return name in self._computing

    def attach(self, request: Request, num_tokens: int) -> None:
        """Share the first `num_tokens` (a result of `match`) with `request`, which has a slot and holds nothing."""
        assert request not in self._committed, f"request {request.request_id} already holds pages"
        count = num_tokens // self.page_size
        names = self._names(request, count)
        for number, group in enumerate(self.groups):
            held = group.attach(request, names, count)
            self._note(number, request, held.first, held.pages)
        self._committed[request] = count
        self._count_lookup(request, num_tokens)
        self._promise(request, count)

    def _count_lookup(self, request: Request, found: int) -> None:
        self._lookups += 1
        self._lookup_tokens += request.num_known
        self._hit_tokens += found

    def _promise(self, request: Request, start: int) -> None:
        """The blocks of known tokens from `start` on are being computed by this request."""
        if self.enable_prefix:
            for name in self._names(request, request.num_known // self.page_size)[start:]:
                self._computing.setdefault(name, request)

    def attach_around(self, request: Request, num_tokens: int) -> int | None:
        """As `attach` for a prefix of which some blocks are yet to be written: they have pages, but no names before
        `fill` says that they are there. Returns the tokens before the first of them; None, without effect, where
        pages are lacking."""
        assert request not in self._committed, f"request {request.request_id} already holds pages"
        count = num_tokens // self.page_size
        names = self._names(request, count)
        lacking = [group.lacking(names, count) for group in self.groups]
        if not all(has_room(g, names, count, blocks) for g, blocks in zip(self.groups, lacking, strict=True)):
            return None
        for number, group in enumerate(self.groups):
            group.attach_around(request, names, count)
            held = group.held(request)
            self._note(number, request, held.first, held.pages)
        start = self._committed[request] = min((blocks[0] for blocks in lacking if blocks), default=count)
        self._promise(request, start)
        return start * self.page_size

    def fill(self, request: Request, num_tokens: int) -> None:
        """What `attach_around` gave pages is written, or will be by steps already sent; `commit` names it."""
        for group in self.groups:
            group.held(request).found = num_tokens // self.page_size
        self._count_lookup(request, num_tokens)

    def commit(self, request: Request) -> None:
        """Name the full blocks whose tokens are known and computed; cost is in proportion to the new blocks."""
        done = self._committed.get(request)
        if done is None or not self.enable_prefix:
            return
        count = min(len(request.prompt_ids) + len(request.output_ids), request.num_computed) // self.page_size
        if count <= done:
            return
        names = self._names(request, count)
        for block in range(done, count):
            for group in self.groups:
                group.publish(request, names[block], block, names[block - 1] if block else None)
            if self._computing.get(names[block]) is request:
                del self._computing[names[block]]
        self._committed[request] = count

    # Pages

    def allocate(self, request: Request, upto_tokens: int) -> bool:
        """Hold pages for the positions below `upto_tokens` in every group; False if some group lacks them.

        Pages that no query from num_computed on reads are released first, whatever the answer.
        """
        end = -(-upto_tokens // self.page_size)
        for group in self.groups:
            if not group.holds(request, end):
                break
        else:
            return True
        starts = [group.prepare(request) for group in self.groups]
        if min(starts) >= end:
            return True
        for start, group in zip(starts, self.groups, strict=True):
            if end - start > group.pool.available:
                return False
        for number, start in enumerate(starts):
            if start < end:
                self._note(number, request, start, self.groups[number].extend(request, end - start))
        return True

    def reserve(self, request: Request, upto_tokens: int) -> bool:
        """`allocate` for positions that may never be used: releases nothing."""
        end = -(-upto_tokens // self.page_size)
        ends = [held.end for held in self.held(request)]
        if any(end - start > g.pool.available for start, g in zip(ends, self.groups, strict=True)):
            return False
        for number, start in enumerate(ends):
            if start < end:
                self._note(number, request, start, self.groups[number].extend(request, end - start))
        return True

    def fit(self, request: Request, upto_tokens: int) -> int:
        """The most positions, at most `upto_tokens`, that `allocate` could hold now."""
        for group in self.groups:
            end = group.prepare(request) + group.pool.available
            upto_tokens = min(upto_tokens, end * self.page_size)
        return upto_tokens

    def rewind(self, request: Request, num_tokens: int) -> None:
        """Release pages that lie wholly at or after position `num_tokens` (rejected draft tokens)."""
        for group in self.groups:
            group.truncate(request, num_tokens)

    def release(self, request: Request) -> None:
        """Release all that `request` holds. Named pages stay cached. No effect if it holds nothing."""
        done = self._committed.pop(request, None)
        if done is None:
            return
        for group in self.groups:
            group.end(request, done)
            group.release(request)
        self._stop_computing(request)

    def detach(self, request: Request, key: str) -> None:
        """Keep the pages of a request that ends: held under `key`, whoever asks for them later, until given back."""
        self.commit(request)
        done = self._committed.pop(request)
        self._detached.add(key)
        for group in self.groups:
            group.end(request, done)
            group.detach(request, key)
        self._stop_computing(request)

    def detached(self, key: str) -> list[HeldPages]:
        """What is held under `key` in each group; not to be changed."""
        return [group.detached(key) for group in self.groups]

    def release_detached(self, key: str) -> None:
        """Give back what is held under `key`. No effect if that is nothing."""
        self._detached.discard(key)
        for group in self.groups:
            group.release_detached(key)

    @property
    def num_detached(self) -> int:
        """Keys under which pages are held."""
        return len(self._detached)

    def _stop_computing(self, request: Request) -> None:
        for name in request.block_names:
            if self._computing.get(name) is request:
                del self._computing[name]

    def pin(self, names: Sequence[bytes], count: int = 1) -> None:
        """Have blocks evicted after all others, those that come later included; `count` = -1 takes it back."""
        for group in self.groups:
            for name in names:
                group.pin(name, count)

    def supersede(self, names: Sequence[bytes]) -> None:
        """Have cached blocks evicted before others; unknown names are skipped."""
        for group in self.groups:
            for name in names:
                group.supersede(name)

    def forget(self, prefix: bytes) -> None:
        """Forget the blocks whose names begin so; what requests still hold is not shared any more."""
        for group in self.groups:
            group.forget_names(prefix)

    def forget_each(self, names: Sequence[bytes]) -> None:
        """As `forget`, for blocks of these names."""
        for group in self.groups:
            group.forget_each(names)

    def names_of(self, token_ids: Sequence[int], salt: str) -> list[bytes]:
        """Names of the whole blocks of a sequence."""
        names: list[bytes] = []
        for start in range(0, len(token_ids) // self.page_size * self.page_size, self.page_size):
            parent = names[-1] if names else self._namer.root(salt)
            names.append(self._namer.next(parent, token_ids[start : start + self.page_size]))
        return names

    def tag(self, salt: str) -> bytes:
        """What the names of a tenant's blocks begin with."""
        return self._namer.tag(salt)

    def clear(self) -> None:
        """Forget every cached prefix that no request holds."""
        for group in self.groups:
            group.clear()

    def drain_updates(self) -> list[PageUpdate]:
        """Changes of the page tables since the last call, each (group, slot, block) once."""
        updates = [(*place, page) for place, page in self._updates.items()]
        self._updates.clear()
        return updates

    # Sizes

    def pages_needed(self, num_tokens: int, extend_len: int) -> list[int]:
        """Most pages a sequence holds in each group while it grows to `num_tokens` by steps of `extend_len`."""
        return [g.group.pages_for(num_tokens, extend_len, self.page_size) for g in self.groups]

    def first_page(self, group: int, shard: int) -> int:
        """Where the pages of a data shard begin in a pool, in which those of all shards stand one after the other."""
        return shard * self.groups[group].pool.num_pages

    def held(self, request: Request) -> list[HeldPages]:
        """What the request holds in each group; not to be changed."""
        return [group.held(request) for group in self.groups]

    def pages_held(self, request: Request) -> list[int]:
        return [group.num_held(request) for group in self.groups]

    def pages_shared(self, request: Request, num_tokens: int) -> list[int]:
        """Pages of a matched prefix that other requests hold anyway, in each group."""
        count = num_tokens // self.page_size
        names = self._names(request, count)
        return [group.num_leased(group.prefix_blocks(names, count)) for group in self.groups]

    def longest_sequence(self, limit: int) -> int:
        """Tokens, at most `limit`, of the longest sequence that fits when nothing else is held."""
        for group in self.groups:
            if group.group.pages_for(limit, 1, self.page_size) > group.pool.num_pages:
                limit = group.pool.num_pages * self.page_size
        return limit

    def stats(self) -> dict[str, int]:
        """Counters since the start, and pages by state per group."""
        figures = {
            "prefix_lookups": self._lookups,
            "prefix_lookup_tokens": self._lookup_tokens,
            "prefix_hit_tokens": self._hit_tokens,
        }
        for group in self.groups:
            pool, name = group.pool, group.group.name
            figures[f"{name}.pages_total"] = pool.num_pages
            figures[f"{name}.pages_free"] = pool.num_free
            figures[f"{name}.pages_cached"] = pool.num_cached
            figures[f"{name}.pages_leased"] = pool.num_leased
            figures[f"{name}.evictions"] = pool.evictions
        return figures

    def check_integrity(self) -> None:
        """Raises AssertionError when a page is lost, doubled, or held by nobody known."""
        for group in self.groups:
            group.check_integrity()
        for name, request in self._computing.items():
            assert request in self._committed, f"block {name.hex()} waits for a request that holds no pages"

    # Internals

    def _matchable_blocks(self, request: Request) -> int:
        if not self.enable_prefix or request.params.prompt_logprobs is not None:
            return 0
        return (request.num_known - 1) // self.page_size

    def _names(self, request: Request, count: int) -> list[bytes]:
        """Names of at least the first `count` blocks, whose tokens are known; each is computed once."""
        names = request.block_names
        if len(names) < count:
            parent = names[-1] if names else self._namer.root(request.cache_salt, request.adapter)
            for block in range(len(names), count):
                start = block * self.page_size
                parent = self._namer.next(parent, [request.token(start + i) for i in range(self.page_size)])
                names.append(parent)
        return names

    def _note(self, number: int, request: Request, first_block: int, pages: Sequence[int]) -> None:
        assert request.slot >= 0, f"request {request.request_id} gets pages before it has a slot"
        for offset, page in enumerate(pages):
            self._updates[number, request.slot, first_block + offset] = page

"""One cache group at work: its pool, its prefix index, and the pages that each request holds in it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trillion_infer.cache.eviction import Block, EvictionPolicy
from trillion_infer.cache.pages import PagePool
from trillion_infer.cache.prefix import PrefixIndex
from trillion_infer.config.cache import CacheGroup
from trillion_infer.core.request import Request

POPULAR = 8
"""A block hit more often than this is a shared prompt, whose branches live side by side."""


@dataclass
class HeldPages:
    """Pages of consecutive blocks: pages[i] holds block first + i. The first `found` blocks were there before."""

    first: int = 0
    pages: list[int] = field(default_factory=list)
    found: int = 0

    @property
    def end(self) -> int:
        return self.first + len(self.pages)

    def page(self, block: int) -> int | None:
        """The page of a block, None if it is not held."""
        return self.pages[block - self.first] if self.first <= block < self.end else None


class GroupPages:
    """Page accounting of one group. Block b of a sequence holds the positions [b * page_size, (b + 1) * page_size)."""

    def __init__(self, group: CacheGroup, page_size: int, policy: EvictionPolicy | None = None):
        self.group = group
        self.page_size = page_size
        self.index = PrefixIndex()
        self.pool = PagePool(group.num_pages, policy, on_evict=self._forget)
        self.on_evict: Callable[[Block], None] | None = None
        """Called with a block whose page is about to be given to somebody else."""
        self.on_publish: Callable[[Block], None] | None = None
        """Called with a block that has got its name."""
        self._pins: dict[bytes, int] = {}
        self._held: dict[Request, HeldPages] = {}
        self._is_full = group.is_full
        self._detached: dict[str, HeldPages] = {}

    def held(self, request: Request) -> HeldPages:
        """The pages of a request that was attached."""
        return self._held[request]

    def holds(self, request: Request, end: int) -> bool:
        """The request holds every block below `end` and none that `prepare` would release."""
        held = self._held[request]
        return self._is_full and held.first + len(held.pages) >= end

    def num_held(self, request: Request) -> int:
        """0 for a request that holds nothing."""
        held = self._held.get(request)
        return len(held.pages) if held is not None else 0

    def first_needed(self, position: int) -> int:
        """First block that a query at `position` reads."""
        return self.group.first_visible(position) // self.page_size

    def longest_usable(self, names: Sequence[bytes], limit: int) -> list[bool]:
        """usable[n]: all blocks of this group that a query right after n leading blocks reads are present."""
        usable = [True]
        run = 0
        for count in range(1, limit + 1):
            run = run + 1 if names[count - 1] in self.index else 0
            usable.append(run >= count - self.first_needed(count * self.page_size))
        return usable

    def prefix_blocks(self, names: Sequence[bytes], count: int) -> list[Block]:
        """The blocks to share when `count` leading blocks are taken over."""
        found = [self.index.find(name) for name in names[self.first_needed(count * self.page_size) : count]]
        assert None not in found, "attached more of a prefix than was matched"
        return [block for block in found if block is not None]

    def num_leased(self, blocks: Sequence[Block]) -> int:
        return sum(self.pool.is_leased(block.page) for block in blocks)

    def attach(self, request: Request, names: Sequence[bytes], count: int) -> HeldPages:
        """Share the pages of `count` leading blocks with `request`, which holds nothing yet."""
        blocks = self.prefix_blocks(names, count)
        for block in blocks:
            self.pool.share(block)
            block.hits += 1
            block.superseded = False
        held = HeldPages(count - len(blocks), [block.page for block in blocks], count)
        self._held[request] = held
        return held

    def attach_around(self, request: Request, names: Sequence[bytes], count: int) -> None:
        """Let `request`, which holds nothing yet, hold all that a query right after `count` leading blocks reads:
        what is present is shared, for the others pages are leased, without names. There are enough."""
        first = self.first_needed(count * self.page_size)
        found = [self.index.find(name) for name in names[first:count]]
        for block in found:
            if block is not None:
                self.pool.share(block)
                block.hits += 1
                block.superseded = False
        pages = [self.pool.lease() if block is None else block.page for block in found]
        self._held[request] = HeldPages(first, pages)

    def prepare(self, request: Request) -> int:
        """Release the blocks that no query from `num_computed` on reads; the number of the next block to add."""
        held = self._held[request]
        if not self.group.is_full:
            count = min(self.first_needed(request.num_computed) - held.first, len(held.pages))
            if count > 0:
                for page in held.pages[:count]:
                    self._release(page)
                del held.pages[:count]
                held.first += count
            if not held.pages:  # what is before the window was computed elsewhere
                held.first = max(held.first, self.first_needed(request.num_computed))
        return held.first + len(held.pages)

    def extend(self, request: Request, count: int) -> list[int]:
        """Lease pages for the next `count` blocks; there are enough."""
        pages = [self.pool.lease() for _ in range(count)]
        self._held[request].pages.extend(pages)
        return pages

    def truncate(self, request: Request, num_tokens: int) -> None:
        """Release the blocks that lie wholly at or after `num_tokens`."""
        held = self.held(request)
        keep = max(0, -(-num_tokens // self.page_size) - held.first)
        for page in reversed(held.pages[keep:]):
            self._release(page)
        del held.pages[keep:]

    def publish(self, request: Request, name: bytes, depth: int, parent: bytes | None) -> None:
        """Name block `depth` of a request, if it is held and new; other branches after its parent are superseded."""
        page = self.held(request).page(depth)
        if page is not None and self.index.block_at(page) is None:
            block = self._name(name, page, depth, parent)
            if block is not None and block.parent is not None:
                self._supersede_siblings(block, block.parent)
            if block is not None and self.on_publish is not None:
                self.on_publish(block)

    def _name(self, name: bytes, page: int, depth: int, parent: bytes | None) -> Block | None:
        block = self.index.publish(name, page, depth, parent)
        if block is not None:
            block.pins = self._pins.get(name, 0)
        return block

    def _supersede_siblings(self, block: Block, parent: Block) -> None:
        """A chat that goes on from an edited turn leaves its old branch; a popular prefix is no chat."""
        if parent.hits > POPULAR or len(parent.children) == 1:
            return
        stack = [child for child in parent.children if child is not block]
        while stack:
            left = stack.pop()
            if not left.superseded:
                left.superseded = True
                self.pool.revalue(left)
                stack.extend(left.children)

    def pin(self, name: bytes, count: int) -> None:
        """Add `count` pins, which may be negative, to a block that is cached or may come."""
        pins = self._pins.pop(name, 0) + count
        assert pins >= 0, f"block {name.hex()} is unpinned more often than pinned"
        if pins:
            self._pins[name] = pins
        block = self.index.find(name)
        if block is not None:
            block.pins = pins
            self.pool.revalue(block)

    def supersede(self, name: bytes) -> None:
        """Have a cached block given up before others."""
        block = self.index.find(name)
        if block is not None and not block.superseded:
            block.superseded = True
            self.pool.revalue(block)

    def end(self, request: Request, count: int) -> None:
        """The request leaves its `count` named blocks to others; `release` or `detach` follows."""
        held, names = self._held[request], request.block_names[:count]
        prompt = min(len(request.prompt_ids) // self.page_size, count)
        growth = self.pool.policy.growth(names, prompt, held.found)
        for page in held.pages:
            block = self.index.block_at(page)
            if block is not None:
                block.growth = growth

    def release(self, request: Request) -> None:
        """Release every page, the deepest first: what is freed first is evicted first."""
        held = self._held.pop(request, None)
        if held is not None:
            for page in reversed(held.pages):
                self._release(page)

    def detach(self, request: Request, key: str) -> None:
        """The pages of a request are held under `key` from now on, and no longer by the request."""
        self._detached[key] = self._held.pop(request)

    def detached(self, key: str) -> HeldPages:
        return self._detached[key]

    def release_detached(self, key: str) -> None:
        """Release what is held under `key`; no effect if that is nothing."""
        held = self._detached.pop(key, None)
        if held is not None:
            for page in reversed(held.pages):
                self._release(page)

    def _forget(self, block: Block) -> None:
        self.index.drop(block)
        if self.on_evict is not None:
            self.on_evict(block)

    def lacking(self, names: Sequence[bytes], count: int) -> list[int]:
        """Of the blocks that a query right after `count` leading blocks reads, those that are not present."""
        return [b for b in range(self.first_needed(count * self.page_size), count) if names[b] not in self.index]

    def restore(self, names: Sequence[bytes], blocks: Sequence[int]) -> list[tuple[int, int]]:
        """Make lacking blocks present and cached; (block, page) of each, to be filled by the caller.

        The pool has pages enough. May evict other blocks.
        """
        filled = [(depth, self.pool.lease()) for depth in blocks]
        for depth, page in filled:
            self._name(names[depth], page, depth, names[depth - 1] if depth else None)
        for _, page in reversed(filled):
            self._release(page)
        return filled

    def forget_names(self, prefix: bytes) -> None:
        """Drop every block whose name begins so; pages that requests hold lose their name only."""
        for block in self.index.starting_with(prefix):
            if not self.pool.is_leased(block.page):
                self.pool.forget(block)
            self.index.drop(block)

    def forget_each(self, names: Sequence[bytes]) -> None:
        """Drop blocks; pages that requests hold lose their name only."""
        for block in [block for name in names if (block := self.index.find(name)) is not None]:
            if not self.pool.is_leased(block.page):
                self.pool.forget(block)
            self.index.drop(block)

    def _release(self, page: int) -> None:
        self.pool.release(page, self.index.block_at(page))

    def clear(self) -> None:
        """Forget every cached block that nobody holds."""
        for block in list(self.pool.cached_blocks()):
            self.pool.forget(block)
            self.index.drop(block)

    def check_integrity(self) -> None:
        """Raises AssertionError when reference counts do not match what requests hold."""
        self.pool.check_integrity()
        holders: dict[int, int] = {}
        for held in (*self._held.values(), *self._detached.values()):
            for page in held.pages:
                holders[page] = holders.get(page, 0) + 1
        self.pool.check_references(holders)
        self.index.check_integrity()


def has_room(group: GroupPages, names: Sequence[bytes], count: int, lacking: Sequence[int]) -> bool:
    """The pool can lease a page for each lacking block, beside those present, and one to go on with."""
    present = count - group.first_needed(count * group.page_size) - len(lacking)
    return len(lacking) + 1 <= group.pool.available - present

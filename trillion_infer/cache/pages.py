"""Pages of one pool: free, cached (named, held by nobody) or leased (held by one request or more)."""

from collections.abc import Callable, Iterator, Mapping

from trillion_infer.cache.eviction import Block, EvictionPolicy, LeastValuable
from trillion_infer.core.errors import OutOfMemoryError


class PagePool:
    """Reference counts of the pages 0 .. num_pages - 1.

    on_evict: called with a cached block before its page is given to somebody else.
    """

    def __init__(
        self,
        num_pages: int,
        policy: EvictionPolicy | None = None,
        on_evict: Callable[[Block], None] | None = None,
    ):
        self.num_pages = num_pages
        self.evictions = 0
        self.policy = LeastValuable() if policy is None else policy
        self._on_evict = on_evict
        self._refs = [0] * num_pages
        self._free = list(reversed(range(num_pages)))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self.policy)

    @property
    def num_leased(self) -> int:
        return self.num_pages - self.available

    @property
    def available(self) -> int:
        """Pages that `lease` can give: free ones, and cached ones by eviction."""
        return len(self._free) + len(self.policy)

    def is_leased(self, page: int) -> bool:
        return self._refs[page] > 0

    def lease(self) -> int:
        """A page for one holder; evicts the cached block worth least if none is free."""
        if self._free:
            page = self._free.pop()
        elif len(self.policy):
            block = self.policy.evict()
            self.evictions += 1
            if self._on_evict is not None:
                self._on_evict(block)
            page = block.page
        else:
            raise OutOfMemoryError(
                f"All {self.num_pages} pages of the pool are held by requests; release some, or ask `available` first."
            )
        self._refs[page] = 1
        return page

    def share(self, block: Block) -> None:
        """One more holder of a named block, cached or leased."""
        if self._refs[block.page] == 0:
            self.policy.remove(block)
        self._refs[block.page] += 1

    def release(self, page: int, block: Block | None) -> None:
        """One holder less. The last one leaves the page cached if it has a name, free otherwise."""
        assert self._refs[page] > 0, f"page {page} is released more often than leased"
        self._refs[page] -= 1
        if self._refs[page] == 0:
            if block is None:
                self._free.append(page)
            else:
                self.policy.insert(block)

    def revalue(self, block: Block) -> None:
        """What the policy knows of a block has changed."""
        if self._refs[block.page] == 0:
            self.policy.revalue(block)

    def forget(self, block: Block) -> None:
        """Free the page of a cached block (its name goes too: the caller drops it from the index)."""
        self.policy.remove(block)
        self._free.append(block.page)

    def cached_blocks(self) -> Iterator[Block]:
        """Blocks nobody holds."""
        return iter(self.policy)

    def check_references(self, holders: Mapping[int, int]) -> None:
        """Each page has as many references as `holders` says (0 where it is silent). Raises AssertionError."""
        wrong = {page: refs for page, refs in enumerate(self._refs) if refs != holders.get(page, 0)}
        assert not wrong, f"references {wrong} do not match the holders {dict(holders)}"

    def check_integrity(self) -> None:
        """Every page is free, cached or leased, and only one of them. Raises AssertionError."""
        free, cached = set(self._free), {block.page for block in self.policy}
        leased = {page for page, refs in enumerate(self._refs) if refs > 0}
        assert len(free) == len(self._free), "a page is twice in the free list"
        assert len(cached) == len(self.policy), "two cached blocks share a page"
        both = (free & cached) | (free & leased) | (cached & leased)
        assert not both, f"pages {sorted(both)} are in two states at once"
        counts = f"free {len(free)} + cached {len(cached)} + leased {len(leased)}"
        assert len(free) + len(cached) + len(leased) == self.num_pages, f"{counts} is not {self.num_pages}"

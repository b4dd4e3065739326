"""KV pages between the device pools and the tiers beyond them, in the order of the device's steps."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from jaxtyping import Array

from trillion_infer.cache.eviction import Block
from trillion_infer.cache.tiers.base import BlockKey, group_of
from trillion_infer.cache.tiers.stack import TierStack
from trillion_infer.engine.layered import LayerSteps
from trillion_infer.engine.page_copies import PageCopier, Pools
from trillion_infer.engine.promoter import Promoter
from trillion_infer.schedule.scheduler import Scheduler
from trillion_infer.transfer.pages import PAGES_PER_CALL, PoolSide

if TYPE_CHECKING:
    from trillion_infer.engine.engine import Engine

LOOK_AHEAD = 64
"""Blocks next to be evicted that are looked at, to fill a call that reads pages."""


def attach_tiers(engine: "Engine", stack: TierStack, copier: PageCopier, owns_stack: bool = True) -> None:
    """Puts the tiers behind an engine's pools; every program they need is compiled."""
    steps = LayerSteps(engine, copier.parts) if engine.programs.buckets.layered else None
    engine.replace_pools(copier.warm_up(engine.all_pools, by_parts=steps is not None))
    engine.tiering = KVTiering(stack, engine.schedulers, copier, owns_stack, steps)


@dataclass(frozen=True)
class _Page:
    """A page that holds a block, of one data shard."""

    shard: int
    group: int
    name: bytes
    page: int

    @property
    def key(self) -> tuple[int, bytes]:
        return self.group, self.name


class KVTiering:
    """Copies blocks out before a step overwrites their pages, and stored blocks in before a request starts.

    One thread, the engine's, owns it. `pools` are all of the engine's, those of models that draft among them. Pages are
    read from the pools between planning a step and sending it: that is what the steps sent so far leave in them. A
    call that reads pages reads PAGES_PER_CALL whatever it needs, so what is left of it takes the blocks that are to be
    evicted next. Shared tiers get each block when it is computed. Engines of one thread may share a stack, which one
    of them owns. steps: run a request's first step as the layers of its prefix arrive, where that is possible.
    """

    def __init__(
        self,
        stack: TierStack,
        schedulers: Sequence[Scheduler],
        copier: PageCopier,
        owns_stack: bool = True,
        steps: LayerSteps | None = None,
    ):
        self.stack, self._copier, self._owns_stack, self._steps = stack, copier, owns_stack, steps
        self._schedulers = list(schedulers)
        self._groups = range(len(schedulers[0].cache.groups))
        self._evicted: list[_Page] = []
        self._published: list[_Page] = []
        self._bytes_out = 0
        self._is_closed = False
        self.promoter = Promoter(stack, self._schedulers, copier, steps)
        for shard, scheduler in enumerate(self._schedulers):
            for number, group in enumerate(scheduler.cache.groups):
                group.on_evict = self._recorder(self._evicted, shard, number)
                if stack.is_shared:
                    group.on_publish = self._recorder(self._published, shard, number)

    def _recorder(self, pages: list[_Page], shard: int, number: int) -> Callable[[Block], None]:
        return lambda block: pages.append(_Page(shard, number, block.name, block.page))

    def _keys(self, group: int, name: bytes) -> list[BlockKey]:
        """Of every part of a block."""
        return [(unit, name) for unit in self._copier.units[group]]

    def is_at_hand(self, group: int, name: bytes) -> bool:
        """The whole block is in the first tier or on its way there, so that it need not be stored again."""
        return all(self.stack.is_at_hand(key) for key in self._keys(group, name))

    # Device to tiers

    def save_evicted(self, pools: Pools, unwritten: Collection[int] = (), group_unwritten: int = -1) -> None:
        """Starts copying what was evicted since the last call; call it before the pages are written again.

        unwritten: pages of one group that have a name already and not yet its content.
        """
        evicted = [page for page in self._evicted if not self.is_at_hand(*page.key)]
        self._evicted.clear()
        for group in self._groups:
            pages = [page for page in evicted if page.group == group]
            if pages:
                skipped = unwritten if group == group_unwritten else ()
                more = self._next_victims(pages, group, -len(pages) % PAGES_PER_CALL, skipped)
                self._save(pools, group, [*pages, *more])
        if self._published:
            self._save_published(pools, PAGES_PER_CALL)

    def _next_victims(
        self, evicted: Sequence[_Page], group: int, count: int, skipped: Collection[int]
    ) -> Iterator[_Page]:
        """At most `count` blocks of the last page's shard that will be given up next and are stored nowhere."""
        shard, taken = evicted[-1].shard, {page.key for page in evicted}
        blocks = self._schedulers[shard].cache.groups[group].pool.cached_blocks()
        pages = (
            _Page(shard, group, block.name, block.page)
            for block in islice(blocks, LOOK_AHEAD)
            if block.page not in skipped
        )
        new = (page for page in pages if page.key not in taken and not self.is_at_hand(*page.key))
        return islice(new, count)

    def _save_published(self, pools: Pools, at_least: int) -> None:
        """Copies computed blocks to the shared tiers, once there are `at_least` of a group: in whole calls."""
        waiting, self._published[:] = list(self._published), []
        for group in self._groups:
            pages = [page for page in waiting if page.group == group]
            ready = len(pages) if at_least == 1 else len(pages) // at_least * at_least
            self._published += pages[ready:]
            new = [page for page in pages[:ready] if not self._is_stored(page) and self._is_there(page)]
            self._save(pools, group, new, only_shared=True)

    def _is_stored(self, page: _Page) -> bool:
        return all(key in self.stack for key in self._keys(*page.key))

    def _is_there(self, page: _Page) -> bool:
        """The block has not been evicted since."""
        block = self._schedulers[page.shard].cache.groups[page.group].index.find(page.name)
        return block is not None and block.page == page.page

    def save_cached(self, pools: Pools, names: Collection[bytes] | None = None, waits: bool = True) -> None:
        """Copies blocks that are cached on the device, of these names or all, the least valuable first.

        waits: until they are stored, so that none is left out because too much is in flight.
        """
        wanted = None if names is None else set(names)
        for shard, scheduler in enumerate(self._schedulers):
            for number, group in enumerate(scheduler.cache.groups):
                blocks = [
                    _Page(shard, number, block.name, block.page)
                    for block in group.pool.cached_blocks()
                    if (wanted is None or block.name in wanted) and not self.is_at_hand(number, block.name)
                ]
                for start in range(0, len(blocks), PAGES_PER_CALL):
                    self._save(pools, number, blocks[start : start + PAGES_PER_CALL])
                    if waits:
                        self.stack.flush()

    def persist(self, pools: Pools, names: Sequence[bytes]) -> None:
        """Copies blocks of these names, wherever they are, to the first tier that outlives the process."""
        self.save_cached(pools, names)
        self.stack.persist(self._all_keys(names))

    def _save(self, pools: Pools, group: int, pages: Sequence[_Page], only_shared: bool = False) -> None:
        for start in range(0, len(pages), PAGES_PER_CALL):
            part = pages[start : start + PAGES_PER_CALL]
            size = sum(map(self._copier.unit_bytes, self._copier.units[group])) * len(part)
            if not self.stack.can_take(size):
                self.stack.drop(len(part))
                continue
            data = self._copier.read(pools, group, [self._place(page.shard, group, page.page) for page in part])
            keys = [key for page in part for key in self._keys(*page.key)]
            self.stack.submit(keys, _reader(self._copier, data, group, len(part)), size, only_shared)
            self._bytes_out += size

    def _place(self, shard: int, group: int, page: int) -> int:
        return self._schedulers[shard].cache.first_page(group, shard) + page

    # Tiers to device

    def promote(self, pools: Pools, is_idle: bool) -> Pools:
        """Writes blocks that came for requests that wait; the pools with them, and with what was computed on the way.

        is_idle: nothing else is being computed, so all that came is written, and what comes shortly is waited for.
        """
        for arrival in self.promoter.arrivals(is_idle):
            group, filled = group_of(arrival.unit), arrival.restore()
            by_part = arrival.prefill is not None
            self.save_evicted(pools, () if by_part else {page for page, _ in filled}, group)
            places = [self._place(arrival.shard, group, page) for page, _ in filled]
            if filled and by_part:
                pools = self._copier.write_part(pools, arrival.unit, places, [units[0] for _, units in filled])
            elif filled:
                pools = self._copier.write(pools, group, places, [units for _, units in filled])
            if arrival.prefill is not None and self._steps is not None:
                pools = self._steps.send(arrival.prefill, pools)
        return pools

    # Deleting

    def discard(self, names: Sequence[bytes]) -> None:
        """Deletes blocks of these names in every tier beyond the device."""
        wanted = set(names)
        self.promoter.drop(lambda name: name in wanted)
        self.stack.discard(self._all_keys(names))

    def delete_tenant(self, tag: bytes) -> None:
        """Deletes the blocks whose names begin with `tag` in every tier beyond the device."""
        for pages in (self._evicted, self._published):
            pages[:] = [page for page in pages if not page.name.startswith(tag)]
        self.promoter.drop(lambda name: name.startswith(tag))
        self.stack.delete_tenant(tag)

    def _all_keys(self, names: Sequence[bytes]) -> list[BlockKey]:
        return [key for group in self._groups for name in names for key in self._keys(group, name)]

    # Figures, end

    def stats(self) -> dict[str, int]:
        """`kv_<tier>.*`: hit_tokens, bytes, blocks, evictions, digest_failures and more; bytes moved in and out."""
        stored = self.stack.stats() if self._owns_stack else {}
        return {**stored, **self.promoter.stats(), "kv_demoted_bytes": self._bytes_out}

    def memory(self) -> dict[str, int]:
        """Bytes of KV in each tier: `host_kv`, `disk_kv`."""
        return {f"{tier.name}_kv": tier.used for tier in self.stack.tiers} if self._owns_stack else {}

    def close(self, pools: Pools) -> None:
        """Stores what the device holds in the tiers that outlive the process, if there are any. Once."""
        if self._is_closed:
            return
        self._is_closed = True
        self.promoter.close()
        if any(tier.is_durable for tier in self.stack.tiers):
            self.save_evicted(pools)
            self._save_published(pools, 1)
            self.save_cached(pools)
        if self._owns_stack:
            self.stack.close()


def _reader(copier: PageCopier, data: Sequence[Array], group: int, count: int) -> Callable[[], list[bytes]]:
    return lambda: copier.to_bytes(data, group, count)


def share_tiers(stack: TierStack, engines: Sequence[tuple["Engine", PoolSide]]) -> None:
    """Gives engines whose blocks have the same bytes one stack; the last, which is closed last, closes it."""
    for place, (engine, side) in enumerate(engines, start=1):
        attach_tiers(engine, stack, PageCopier(side), owns_stack=place == len(engines))

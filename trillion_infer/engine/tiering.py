"""KV pages between the device pools and the tiers beyond them, in the order of the device's steps."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import jax
import numpy as np
from jaxtyping import Array

from sharding.heads import HeadPlan
from trillion_infer.cache.eviction import Block
from trillion_infer.cache.layout import PoolLayout
from trillion_infer.cache.tiers.base import BlockKey, Tier
from trillion_infer.cache.tiers.make import make_tiers
from trillion_infer.cache.tiers.stack import TierStack
from trillion_infer.config.engine import EngineConfig
from trillion_infer.engine.promoter import Promoter
from trillion_infer.layers.pools import Pool
from trillion_infer.schedule.scheduler import Scheduler
from trillion_infer.transfer.convert import SCALE_BYTES
from trillion_infer.transfer.pages import PAGES_PER_CALL, PoolSide, extract, insert, padded_ids, page_program

if TYPE_CHECKING:
    from trillion_infer.engine.engine import Engine

Pools = tuple[Pool, ...]

LOOK_AHEAD = 64
"""Blocks next to be evicted that are looked at, to fill a call that reads pages."""


class PageCopier:
    """Pages of the pools as host bytes and back, by logical head: the same bytes whatever the mesh.

    A block of a cache group holds the page of each pool that has the group's pages, those of models that draft behind
    the target's own. Pools go by their number in the side, which is their place in `Engine.all_pools`.
    """

    def __init__(self, side: PoolSide):
        layouts, both = side.layouts, list(zip(side.layouts, side.plans, strict=True))
        self._out = [page_program(extract, side.mesh, plan) for plan in side.plans]
        self._into = [page_program(insert, side.mesh, plan, layout.pool_spec) for layout, plan in both]
        self._shapes = [_block_shape(layout, plan) for layout, plan in both]
        self._dtypes = [np.dtype(np.uint8 if lay.quantised else jax.numpy.dtype(lay.dtype)) for lay in layouts]
        self._names = [layout.dtype for layout in layouts]
        self.num_groups = max(side.groups) + 1
        self._drafters = side.names[self.num_groups :]
        self._parts = [[n for n, own in enumerate(side.groups) if own == group] for group in range(self.num_groups)]

    def open_tiers(self, config: EngineConfig, fingerprint: bytes) -> list[Tier]:
        """The tiers that `config` asks for, for blocks of these pools. Raises what `make_tiers` raises."""
        sizes = [self.block_bytes(group) for group in range(self.num_groups)]
        layout = repr(list(zip(self._shapes, self._names, strict=True))) + "".join(self._drafters)
        return make_tiers(config.host_kv, config.disk_kv, config.store, fingerprint, layout, sizes)

    def block_bytes(self, group: int) -> int:
        """Bytes of one page of a group in all its pools, replicas and padding of heads left out."""
        return sum(self._page_bytes(number) for number in self._parts[group])

    def _page_bytes(self, number: int) -> int:
        return int(np.prod(self._shapes[number])) * self._dtypes[number].itemsize

    def read(self, pools: Pools, group: int, pages: Sequence[int]) -> list[Array]:
        """Starts copying at most PAGES_PER_CALL pages of a group to the host, as the steps sent so far leave them."""
        found = [self._out[number](pools[number], padded_ids(pages, 0)) for number in self._parts[group]]
        for data in found:
            data.copy_to_host_async()
        return found

    def to_bytes(self, data: Sequence[Array], count: int) -> list[bytes]:
        """The bytes of each of the `count` pages that were read."""
        hosts = [np.asarray(part) for part in data]
        return [b"".join([host[:, i].tobytes() for host in hosts]) for i in range(count)]

    def write(self, pools: Pools, group: int, pages: Sequence[int], blocks: Sequence[bytes]) -> Pools:
        """The pools with at most PAGES_PER_CALL blocks of a group in `pages`; donates the group's."""
        written, start = list(pools), 0
        for number in self._parts[group]:
            shape, dtype = self._shapes[number], self._dtypes[number]
            data = np.zeros((shape[0], PAGES_PER_CALL, *shape[1:]), dtype)
            for i, block in enumerate(blocks):
                data[:, i] = np.frombuffer(block, dtype, int(np.prod(shape)), start).reshape(shape)
            start += self._page_bytes(number)
            ids = padded_ids(pages, written[number].shape[1])
            written[number] = self._into[number](written[number], ids, data)
        return tuple(written)

    def warm_up(self, pools: Pools) -> Pools:
        """Compiles what there is, so that no step waits for it."""
        for group in range(self.num_groups):
            self.read(pools, group, [])
            pools = self.write(pools, group, [], [])
        return pools


def attach_tiers(engine: "Engine", stack: TierStack, copier: PageCopier, owns_stack: bool = True) -> None:
    """Puts the tiers behind an engine's pools; every program they need is compiled."""
    engine.replace_pools(copier.warm_up(engine.all_pools))
    engine.tiering = KVTiering(stack, engine.schedulers, copier, owns_stack)


def _block_shape(layout: PoolLayout, plan: HeadPlan | None) -> tuple[int, ...]:
    """Of a page as `extract` gives it, its layers first."""
    scales = SCALE_BYTES if layout.quantised else 0
    if plan is None:
        return (layout.layers, layout.page_size, layout.dim + layout.scale_rows * scales)
    return (layout.layers, layout.page_size, plan.kv_heads, 2, layout.dim + scales)


@dataclass(frozen=True)
class _Page:
    """A page that holds a block, of one data shard."""

    shard: int
    key: BlockKey
    page: int


class KVTiering:
    """Copies blocks out before a step overwrites their pages, and stored blocks in before a request starts.

    One thread, the engine's, owns it. `pools` are all of the engine's, those of models that draft among them. Pages are
    read from the pools between planning a step and sending it: that is what the steps sent so far leave in them. A
    call that reads pages reads PAGES_PER_CALL whatever it needs, so what is left of it takes the blocks that are to be
    evicted next. Shared tiers get each block when it is computed. Engines of one thread may share a stack, which one
    of them owns.
    """

    def __init__(self, stack: TierStack, schedulers: Sequence[Scheduler], copier: PageCopier, owns_stack: bool = True):
        self.stack, self._copier, self._owns_stack = stack, copier, owns_stack
        self._schedulers = list(schedulers)
        self._groups = range(len(schedulers[0].cache.groups))
        self._evicted: list[_Page] = []
        self._published: list[_Page] = []
        self._bytes_out = 0
        self._is_closed = False
        self.promoter = Promoter(stack, self._schedulers, copier.block_bytes)
        for shard, scheduler in enumerate(self._schedulers):
            for number, group in enumerate(scheduler.cache.groups):
                group.on_evict = self._recorder(self._evicted, shard, number)
                if stack.is_shared:
                    group.on_publish = self._recorder(self._published, shard, number)

    def _recorder(self, pages: list[_Page], shard: int, number: int) -> Callable[[Block], None]:
        return lambda block: pages.append(_Page(shard, (number, block.name), block.page))

    # Device to tiers

    def save_evicted(self, pools: Pools, unwritten: Collection[int] = (), group_unwritten: int = -1) -> None:
        """Starts copying what was evicted since the last call; call it before the pages are written again.

        unwritten: pages of one group that have a name already and not yet its content.
        """
        evicted = [page for page in self._evicted if not self.stack.is_at_hand(page.key)]
        self._evicted.clear()
        for group in self._groups:
            pages = [page for page in evicted if page.key[0] == group]
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
            _Page(shard, (group, block.name), block.page)
            for block in islice(blocks, LOOK_AHEAD)
            if block.page not in skipped
        )
        new = (page for page in pages if page.key not in taken and not self.stack.is_at_hand(page.key))
        return islice(new, count)

    def _save_published(self, pools: Pools, at_least: int) -> None:
        """Copies computed blocks to the shared tiers, once there are `at_least` of a group: in whole calls."""
        waiting, self._published[:] = list(self._published), []
        for group in self._groups:
            pages = [page for page in waiting if page.key[0] == group]
            ready = len(pages) if at_least == 1 else len(pages) // at_least * at_least
            self._published += pages[ready:]
            new = [page for page in pages[:ready] if page.key not in self.stack and self._is_there(page)]
            self._save(pools, group, new, only_shared=True)

    def _is_there(self, page: _Page) -> bool:
        """The block has not been evicted since."""
        block = self._schedulers[page.shard].cache.groups[page.key[0]].index.find(page.key[1])
        return block is not None and block.page == page.page

    def save_cached(self, pools: Pools, names: Collection[bytes] | None = None, waits: bool = True) -> None:
        """Copies blocks that are cached on the device, of these names or all, the least valuable first.

        waits: until they are stored, so that none is left out because too much is in flight.
        """
        wanted = None if names is None else set(names)
        for shard, scheduler in enumerate(self._schedulers):
            for number, group in enumerate(scheduler.cache.groups):
                blocks = [
                    _Page(shard, (number, block.name), block.page)
                    for block in group.pool.cached_blocks()
                    if (wanted is None or block.name in wanted) and not self.stack.is_at_hand((number, block.name))
                ]
                for start in range(0, len(blocks), PAGES_PER_CALL):
                    self._save(pools, number, blocks[start : start + PAGES_PER_CALL])
                    if waits:
                        self.stack.flush()

    def persist(self, pools: Pools, names: Sequence[bytes]) -> None:
        """Copies blocks of these names, wherever they are, to the first tier that outlives the process."""
        self.save_cached(pools, names)
        self.stack.persist([(group, name) for group in self._groups for name in names])

    def _save(self, pools: Pools, group: int, pages: Sequence[_Page], only_shared: bool = False) -> None:
        for start in range(0, len(pages), PAGES_PER_CALL):
            part = pages[start : start + PAGES_PER_CALL]
            size = self._copier.block_bytes(group) * len(part)
            if not self.stack.can_take(size):
                self.stack.drop(len(part))
                continue
            data = self._copier.read(pools, group, [self._place(page.shard, group, page.page) for page in part])
            self.stack.submit([page.key for page in part], _reader(self._copier, data, len(part)), size, only_shared)
            self._bytes_out += size

    def _place(self, shard: int, group: int, page: int) -> int:
        return self._schedulers[shard].cache.first_page(group, shard) + page

    # Tiers to device

    def promote(self, pools: Pools, is_idle: bool) -> Pools:
        """Writes blocks that came for requests that wait; the pools with them.

        is_idle: nothing else is being computed, so all that came is written, and what comes shortly is waited for.
        """
        for arrival in self.promoter.arrivals(is_idle):
            filled = arrival.restore()
            self.save_evicted(pools, {page for page, _ in filled}, arrival.group)
            if filled:
                places = [self._place(arrival.shard, arrival.group, page) for page, _ in filled]
                pools = self._copier.write(pools, arrival.group, places, [data for _, data in filled])
        return pools

    # Deleting

    def discard(self, names: Sequence[bytes]) -> None:
        """Deletes blocks of these names in every tier beyond the device."""
        self.stack.discard([(group, name) for group in self._groups for name in names])

    def delete_tenant(self, tag: bytes) -> None:
        """Deletes the blocks whose names begin with `tag` in every tier beyond the device."""
        for pages in (self._evicted, self._published):
            pages[:] = [page for page in pages if not page.key[1].startswith(tag)]
        self.stack.delete_tenant(tag)

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


def _reader(copier: PageCopier, data: Sequence[Array], count: int) -> Callable[[], list[bytes]]:
    return lambda: copier.to_bytes(data, count)


def share_tiers(stack: TierStack, engines: Sequence[tuple["Engine", PoolSide]]) -> None:
    """Gives engines whose blocks have the same bytes one stack; the last, which is closed last, closes it."""
    for place, (engine, side) in enumerate(engines, start=1):
        attach_tiers(engine, stack, PageCopier(side), owns_stack=place == len(engines))

"""KV pages between the device pools and the tiers beyond them, in the order of the device's steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from sharding.heads import HeadPlan
from trillion_infer.cache.eviction import Block
from trillion_infer.cache.kv_cache import KVCache
from trillion_infer.cache.layout import PoolLayout
from trillion_infer.cache.tiers.base import BlockKey, Tier
from trillion_infer.cache.tiers.make import make_tiers
from trillion_infer.cache.tiers.promotion import Promotion, plan_promotion, restore
from trillion_infer.cache.tiers.stack import TierStack
from trillion_infer.config.engine import EngineConfig
from trillion_infer.core.request import Request, Status
from trillion_infer.schedule.scheduler import Scheduler
from trillion_infer.transfer.pages import PAGES_PER_CALL, extract, insert, padded_ids, page_program

Pools = tuple[Array, ...]


class PageCopier:
    """Pages of the pools as host bytes and back, by logical head: the same bytes whatever the mesh."""

    def __init__(self, mesh: Mesh, layouts: Sequence[PoolLayout], plans: Sequence[HeadPlan | None]):
        self._out = [page_program(extract, mesh, plan) for plan in plans]
        self._into = [page_program(insert, mesh, plan, lay.spec) for lay, plan in zip(layouts, plans, strict=True)]
        self._shapes = [_block_shape(layout, plan) for layout, plan in zip(layouts, plans, strict=True)]
        self._dtypes = [jax.numpy.dtype(layout.dtype) for layout in layouts]

    def open_tiers(self, config: EngineConfig, fingerprint: bytes) -> list[Tier]:
        """The tiers that `config` asks for, for blocks of these pools. Raises what `make_tiers` raises."""
        sizes = [self.block_bytes(group) for group in range(len(self._shapes))]
        layout = repr([(shape, dtype.name) for shape, dtype in zip(self._shapes, self._dtypes, strict=True)])
        return make_tiers(config.host_kv, config.disk_kv, config.store, fingerprint, layout, sizes)

    def block_bytes(self, group: int) -> int:
        """Bytes of one page of a group, replicas and padding of heads left out."""
        return int(np.prod(self._shapes[group])) * self._dtypes[group].itemsize

    def read(self, pool: Array, group: int, pages: Sequence[int]) -> Array:
        """Starts copying at most PAGES_PER_CALL pages to the host, as the steps sent so far leave them."""
        data = self._out[group](pool, padded_ids(pages, 0))
        data.copy_to_host_async()
        return data

    def to_bytes(self, data: Array, count: int) -> list[bytes]:
        """The bytes of each of the `count` pages that were read."""
        host = np.asarray(data)
        return [np.ascontiguousarray(host[:, i]).tobytes() for i in range(count)]

    def write(self, pool: Array, group: int, pages: Sequence[int], blocks: Sequence[bytes]) -> Array:
        """The pool with at most PAGES_PER_CALL blocks in `pages`; donates it."""
        shape = self._shapes[group]
        data = np.zeros((shape[0], PAGES_PER_CALL, *shape[1:]), self._dtypes[group])
        for i, block in enumerate(blocks):
            data[:, i] = np.frombuffer(block, self._dtypes[group]).reshape(shape)
        return self._into[group](pool, padded_ids(pages, pool.shape[1]), data)

    def warm_up(self, pools: Pools) -> Pools:
        """Compiles what there is, so that no step waits for it."""
        for group, pool in enumerate(pools):
            self.read(pool, group, [])
        return tuple(self.write(pool, group, [], []) for group, pool in enumerate(pools))


def _block_shape(layout: PoolLayout, plan: HeadPlan | None) -> tuple[int, ...]:
    if plan is None:
        return (layout.layers, layout.page_size, layout.dim)
    return (layout.layers, layout.page_size, plan.kv_heads, 2, layout.dim)


@dataclass(frozen=True)
class _Evicted:
    shard: int
    key: BlockKey
    page: int


class KVTiering:
    """Copies evicted blocks out before a step overwrites their pages, and stored blocks in before a request starts.

    One thread, the engine's, owns it. Evicted pages are read from the pools between planning a step and sending it:
    that is what the steps sent so far leave in them.
    """

    def __init__(self, stack: TierStack, schedulers: Sequence[Scheduler], copier: PageCopier):
        self.stack, self._copier = stack, copier
        self._schedulers = list(schedulers)
        self._evicted: list[_Evicted] = []
        self._watched: dict[Request, int] = {}
        self._promoted: dict[Request, int] = {}
        self._hit_tokens = {tier.name: 0 for tier in stack.tiers}
        self._bytes_in = self._bytes_out = 0
        self._is_closed = False
        for shard, scheduler in enumerate(self._schedulers):
            for number, group in enumerate(scheduler.cache.groups):
                group.on_evict = self._recorder(shard, number)

    def _recorder(self, shard: int, number: int) -> Callable[[Block], None]:
        def record(block: Block) -> None:
            self._evicted.append(_Evicted(shard, (number, block.name), block.page))

        return record

    def watch(self, request: Request, shard: int) -> None:
        """A request was queued with a data shard."""
        self._watched[request] = shard

    def forget(self, request: Request) -> None:
        """It has ended."""
        self._watched.pop(request, None)
        self._promoted.pop(request, None)

    # Device to tiers

    def save_evicted(self, pools: Pools) -> None:
        """Starts copying what was evicted since the last call; call it before the pages are written again."""
        evicted, self._evicted = self._evicted, []
        self._save(pools, [e for e in evicted if not self.stack.is_at_hand(e.key)])

    def save_cached(self, pools: Pools) -> None:
        """Starts copying every block that is cached on the device, the least valuable first."""
        for shard, scheduler in enumerate(self._schedulers):
            for number, group in enumerate(scheduler.cache.groups):
                blocks = [_Evicted(shard, (number, b.name), b.page) for b in group.pool.cached_blocks()]
                lacking = [block for block in blocks if not self.stack.is_at_hand(block.key)]
                for start in range(0, len(lacking), PAGES_PER_CALL):
                    self._save(pools, lacking[start : start + PAGES_PER_CALL])
                    self.stack.flush()

    def _save(self, pools: Pools, evicted: Sequence[_Evicted]) -> None:
        for group, pool in enumerate(pools):
            blocks = [e for e in evicted if e.key[0] == group]
            for start in range(0, len(blocks), PAGES_PER_CALL):
                part = blocks[start : start + PAGES_PER_CALL]
                size = self._copier.block_bytes(group) * len(part)
                if not self.stack.can_take(size):
                    self.stack.drop(len(part))
                    continue
                data = self._copier.read(pool, group, [self._place(e.shard, group, e.page) for e in part])
                self.stack.submit([e.key for e in part], _reader(self._copier, data, len(part)), size)
                self._bytes_out += size

    def _place(self, shard: int, group: int, page: int) -> int:
        """The pages of all data shards stand one after the other in a pool."""
        return shard * self._schedulers[shard].cache.groups[group].pool.num_pages + page

    # Tiers to device

    def promote(self, pools: Pools) -> Pools:
        """Brings back what the next requests to start can take over; the pools with it."""
        waiting = [(request, shard) for request, shard in self._watched.items() if request.status is Status.WAITING]
        if not waiting:
            return pools
        self.stack.refresh()
        for shard in range(len(self._schedulers)):
            pools = self._promote_shard(pools, shard, [request for request, place in waiting if place == shard])
        return pools

    def _promote_shard(self, pools: Pools, shard: int, waiting: list[Request]) -> Pools:
        """Looks at no more requests than have a slot and, by their known tokens, pages."""
        scheduler = self._schedulers[shard]
        cache, config = scheduler.cache, scheduler.config
        room = [group.pool.available for group in cache.groups]
        waiting.sort(key=lambda request: request.priority)
        for place, request in enumerate(waiting[: config.max_running - scheduler.num_running]):
            need = cache.pages_needed(request.num_known + 1, config.prefill_chunk)
            room = [have - want for have, want in zip(room, need, strict=True)]
            if place > 0 and min(room) < 0:
                break
            # Once a wait: what is evicted again before the request starts is computed.
            if self._promoted.get(request) != request.metrics.preemptions:
                pools = self._promote_request(pools, shard, cache, request)
        return pools

    def _promote_request(self, pools: Pools, shard: int, cache: KVCache, request: Request) -> Pools:
        fetched: dict[BlockKey, tuple[bytes, Tier]] = {}
        lost: set[BlockKey] = set()

        def is_stored(key: BlockKey) -> bool:
            return key in fetched or (key not in lost and key in self.stack)

        while (promotion := plan_promotion(cache, request, is_stored)) is not None:
            wanted = (key for key in promotion.keys if key not in fetched)
            missing = next((key for key in wanted if not self._fetch(key, fetched)), None)
            if missing is None:
                break
            lost.add(missing)
        if promotion is None:
            return pools
        self._promoted[request] = request.metrics.preemptions
        self._count(promotion, fetched, cache.page_size)
        filled = restore(cache, promotion)
        self.save_evicted(pools)
        return tuple(
            self._fill(pool, shard, group, pages, promotion, fetched)
            for group, (pool, pages) in enumerate(zip(pools, filled, strict=True))
        )

    def _fetch(self, key: BlockKey, fetched: dict[BlockKey, tuple[bytes, Tier]]) -> bool:
        found = self.stack.get(key)
        if found is None or len(found[0]) != self._copier.block_bytes(key[0]):
            return False
        fetched[key] = found
        return True

    def _fill(
        self,
        pool: Array,
        shard: int,
        group: int,
        filled: list[tuple[int, int]],
        promotion: Promotion,
        fetched: dict[BlockKey, tuple[bytes, Tier]],
    ) -> Array:
        for start in range(0, len(filled), PAGES_PER_CALL):
            part = filled[start : start + PAGES_PER_CALL]
            blocks = [fetched[group, promotion.names[block]][0] for block, _ in part]
            pool = self._copier.write(pool, group, [self._place(shard, group, page) for _, page in part], blocks)
            self._bytes_in += sum(map(len, blocks))
        return pool

    def _count(self, promotion: Promotion, fetched: dict[BlockKey, tuple[bytes, Tier]], page_size: int) -> None:
        """A block counts once, for the slowest tier that held a group's part of it."""
        order = {tier.name: rank for rank, tier in enumerate(self.stack.tiers)}
        slowest: dict[bytes, str] = {}
        for key in promotion.keys:
            name = fetched[key][1].name
            if order[name] >= order[slowest.get(key[1], name)]:
                slowest[key[1]] = name
        for name in slowest.values():
            self._hit_tokens[name] += page_size

    # Figures, end

    def stats(self) -> dict[str, int]:
        """`kv_<tier>.*`: hit_tokens, bytes, blocks, evictions, digest_failures and more; bytes moved in and out."""
        tokens = {f"kv_{name}.hit_tokens": count for name, count in self._hit_tokens.items()}
        moved = {"kv_promoted_bytes": self._bytes_in, "kv_demoted_bytes": self._bytes_out}
        return {**self.stack.stats(), **tokens, **moved}

    def memory(self) -> dict[str, int]:
        """Bytes of KV in each tier: `host_kv`, `disk_kv`."""
        return {f"{tier.name}_kv": tier.used for tier in self.stack.tiers}

    def close(self, pools: Pools) -> None:
        """Stores what the device holds in the tiers that outlive the process, if there are any. Once."""
        if self._is_closed:
            return
        self._is_closed = True
        if any(tier.is_durable for tier in self.stack.tiers):
            self.save_evicted(pools)
            self.save_cached(pools)
        self.stack.close()


def _reader(copier: PageCopier, data: Array, count: int) -> Callable[[], list[bytes]]:
    return lambda: copier.to_bytes(data, count)

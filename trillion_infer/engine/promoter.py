"""Brings stored prefixes back while their requests wait: found and read by a thread, placed batch by batch."""

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from trillion_infer.cache.group import GroupPages
from trillion_infer.cache.kv_cache import KVCache
from trillion_infer.cache.tiers.base import BlockKey, Tier
from trillion_infer.cache.tiers.fetch import Batch, Fetcher, Load, Lookup, in_batches
from trillion_infer.cache.tiers.promotion import Promotion, plan_promotion
from trillion_infer.cache.tiers.stack import TierStack
from trillion_infer.core.request import Request, Status
from trillion_infer.schedule.scheduler import Scheduler
from trillion_infer.transfer.pages import PAGES_PER_CALL

PATIENCE_SECONDS = 10.0
"""A prefix that has not come by then is computed."""
RETRY_SECONDS = 20.0
"""How long a tier that was slower than computing is passed over."""
IDLE_WAIT_SECONDS = 0.02
"""Longest sleep of a step that has nothing else to do."""
LOOK_SECONDS = 0.002
"""How long a step waits for a tier to say what it has: most answer by then, and the request need not miss the step."""
MIN_PREFILL = 32
"""Prompt tokens a step must have to tell the speed of prefill."""
NEW_SHARE = 0.2


@dataclass(frozen=True)
class Arrival:
    """Blocks of one group that are in host memory. `restore` gives them pages: (page, bytes) of each to write."""

    shard: int
    group: int
    restore: Callable[[], list[tuple[int, bytes]]]


@dataclass(eq=False)
class _Waiting:
    """A request that waits for its prefix: first for `lookup`, then for `load`. `pinned` names stay on the device."""

    request: Request
    shard: int
    preemptions: int
    lookup: Lookup
    deadline: float
    load: Load | None = None
    promotion: Promotion | None = None
    missing: int = 0
    found: dict[BlockKey, Tier] = field(default_factory=dict)
    lost: set[BlockKey] = field(default_factory=set)
    sources: dict[BlockKey, str] = field(default_factory=dict)
    pinned: list[bytes] = field(default_factory=list)


class Promoter:
    """Which stored blocks are worth bringing back for which request, and where each stands.

    A request whose prefix is looked for or on its way is held back by its scheduler; others start meanwhile. Blocks
    are placed in the order of depth, so what has come is of use even if the rest does not. A tier that was slower than
    computing the same tokens, by what both took lately, is passed over for RETRY_SECONDS.

    One thread, the engine's, owns it. `chooses` = False brings everything back that is stored, for measurements.
    """

    chooses = True

    def __init__(self, stack: TierStack, schedulers: Sequence[Scheduler], block_bytes: Callable[[int], int]):
        self._stack, self._schedulers = stack, schedulers
        self._block_bytes = [block_bytes(group) for group in range(len(schedulers[0].cache.groups))]
        self._fetcher = Fetcher(stack)
        self._watched: dict[Request, int] = {}
        self._done: dict[Request, int] = {}
        self._waiting: dict[Request, _Waiting] = {}
        self._pinned: dict[Request, tuple[KVCache, list[bytes]]] = {}
        self._slow_until: dict[str, float] = {}
        self._seconds_per_token: float | None = None
        self._hit_tokens = {tier.name: 0 for tier in stack.tiers}
        self._bytes_in = self._slower = self._abandoned = 0

    def watch(self, request: Request, shard: int) -> None:
        """A request was queued with a data shard."""
        self._watched[request] = shard

    def forget(self, request: Request) -> None:
        """It has ended."""
        self._watched.pop(request, None)
        self._done.pop(request, None)
        waiting = self._waiting.pop(request, None)
        if waiting is not None:
            self._cancel(waiting)
        self._unpin(request)

    def record_prefill(self, num_tokens: int, seconds: float) -> None:
        """A step computed `num_tokens` of prompts."""
        if num_tokens >= MIN_PREFILL:
            new = seconds / num_tokens
            old = new if self._seconds_per_token is None else self._seconds_per_token
            self._seconds_per_token = (1 - NEW_SHARE) * old + NEW_SHARE * new

    # The loop

    def arrivals(self, is_idle: bool) -> Iterator[Arrival]:
        """Blocks to place now: a batch if something else is being computed, else all that comes within a short wait."""
        self._begin()
        for request in [request for request in self._pinned if request.status is not Status.WAITING]:
            self._unpin(request)
        while self._waiting:
            for waiting in list(self._waiting.values()):
                while (arrival := self._next(waiting)) is not None:
                    yield arrival
                    if waiting.missing == 0:
                        self._plan(waiting)
                    if not is_idle:
                        return
            if not is_idle or not self._waiting:
                return
            self._fetcher.wait(IDLE_WAIT_SECONDS)
            if not any(self._has_news(waiting) for waiting in self._waiting.values()):
                return

    def _begin(self) -> None:
        """Starts to look for the prefixes of the next requests to start."""
        if self._fetcher.is_stuck:
            return
        for shard, scheduler in enumerate(self._schedulers):
            waiting = [r for r, place in self._watched.items() if place == shard and r.status is Status.WAITING]
            if not waiting:
                continue
            cache, config = scheduler.cache, scheduler.config
            room = [group.pool.available for group in cache.groups]
            waiting.sort(key=lambda request: request.priority)
            for place, request in enumerate(waiting[: config.max_running - scheduler.num_running]):
                need = cache.pages_needed(request.num_known + 1, config.prefill_chunk)
                room = [have - want for have, want in zip(room, need, strict=True)]
                if place > 0 and min(room) < 0:
                    break
                # Once a wait: what is evicted again before the request starts is computed.
                if request not in self._waiting and self._done.get(request) != request.metrics.preemptions:
                    self._look(request, shard, scheduler)

    def _look(self, request: Request, shard: int, scheduler: Scheduler) -> None:
        names = scheduler.cache.matchable_names(request)
        keys = [
            (n, name) for n, group in enumerate(scheduler.cache.groups) for name in names if name not in group.index
        ]
        if not keys:
            self._done[request] = request.metrics.preemptions
            return
        lookup = Lookup(keys)
        deadline = time.monotonic() + PATIENCE_SECONDS
        self._waiting[request] = _Waiting(request, shard, request.metrics.preemptions, lookup, deadline)
        scheduler.hold(request)
        if self._stack.is_instant:
            lookup.found = self._stack.locate(keys)
        else:
            self._fetcher.submit(lookup)
            self._fetcher.wait(LOOK_SECONDS)

    def _has_news(self, waiting: _Waiting) -> bool:
        if waiting.load is None:
            return waiting.lookup.found is not None
        return not waiting.load.ready.empty()

    def _next(self, waiting: _Waiting) -> Arrival | None:
        """A batch that came for one request. The caller plans anew when none is missing any more."""
        if waiting.load is None:
            if waiting.lookup.found is None:
                self._give_up_late(waiting)
                return None
            located = waiting.lookup.found
            worth = {tier for tier in set(located.values()) if self._pays(tier)}
            waiting.found = {key: tier for key, tier in located.items() if tier in worth}
            self._slower += (len(located) - len(waiting.found)) // len(self._block_bytes)
            self._plan(waiting)
        if waiting.load is None or waiting.request not in self._waiting:
            return None
        try:
            batch = waiting.load.ready.get_nowait()
        except queue.Empty:
            self._give_up_late(waiting)
            return None
        waiting.missing -= 1
        return self._arrival(waiting, batch)

    def _plan(self, waiting: _Waiting) -> None:
        """What is still lacking starts to be read; without any the request may start."""
        cache = self._schedulers[waiting.shard].cache
        found, lost = waiting.found, waiting.lost
        promotion = plan_promotion(cache, waiting.request, lambda key: key in found and key not in lost)
        if promotion is None or not promotion.keys:
            self._let_go(waiting)
            return
        self._pin(waiting, cache, promotion)
        batches = in_batches(promotion.keys, PAGES_PER_CALL)
        waiting.promotion, waiting.missing = promotion, len(batches)
        waiting.load = Load(batches, waiting.found)
        self._fetcher.submit(waiting.load)

    def _arrival(self, waiting: _Waiting, batch: Batch) -> Arrival:
        number, promotion = batch.keys[0][0], waiting.promotion
        assert promotion is not None
        group = self._schedulers[waiting.shard].cache.groups[number]

        def restore() -> list[tuple[int, bytes]]:
            depths = {promotion.names[block]: block for block in promotion.lacking[number]}
            whole: dict[int, bytes] = {}
            for key, content in zip(batch.keys, batch.contents, strict=True):
                if content is None or len(content[0]) != self._block_bytes[number]:
                    waiting.lost.add(key)
                elif key[1] not in group.index and len(whole) + 1 < _room(group, promotion):
                    whole[depths[key[1]]] = content[0]
                    waiting.sources[key] = content[1].name
                else:
                    waiting.lost.add(key)
            self._bytes_in += sum(map(len, whole.values()))
            return [(page, whole[depth]) for depth, page in group.restore(promotion.names, sorted(whole))]

        return Arrival(waiting.shard, number, restore)

    def _pays(self, tier: Tier) -> bool:
        """Reading a block of every group takes less than computing its tokens, as far as both are known."""
        read, compute = self._stack.seconds_per_byte(tier), self._seconds_per_token
        now = time.monotonic()
        if not self.chooses:
            return True
        if now < self._slow_until.get(tier.name, 0.0):
            return False
        page_size = self._schedulers[0].cache.page_size
        if read is None or compute is None or read * sum(self._block_bytes) <= compute * page_size:
            return True
        if tier.name in self._slow_until:
            del self._slow_until[tier.name]  # its time is over: one more try, which measures it again
            return True
        self._slow_until[tier.name] = now + RETRY_SECONDS
        return False

    # Ends

    def _give_up_late(self, waiting: _Waiting) -> None:
        if time.monotonic() > waiting.deadline:
            self._abandoned += 1
            self._cancel(waiting)
            self._let_go(waiting)

    def _let_go(self, waiting: _Waiting) -> None:
        request = waiting.request
        self._schedulers[waiting.shard].hold(request, False)
        self._waiting.pop(request, None)
        self._done[request] = waiting.preemptions
        self._pinned[request] = (self._schedulers[waiting.shard].cache, waiting.pinned)
        self._count(waiting)

    def _cancel(self, waiting: _Waiting) -> None:
        waiting.lookup.cancelled = True
        if waiting.load is not None:
            waiting.load.cancelled = True
        self._pinned.setdefault(waiting.request, (self._schedulers[waiting.shard].cache, waiting.pinned))

    def _pin(self, waiting: _Waiting, cache: KVCache, promotion: Promotion) -> None:
        names = promotion.names[: promotion.count]
        cache.pin(waiting.pinned, -1)
        cache.pin(names)
        waiting.pinned = names

    def _unpin(self, request: Request) -> None:
        cache, names = self._pinned.pop(request, (None, []))
        if cache is not None:
            cache.pin(names, -1)

    def _count(self, waiting: _Waiting) -> None:
        """A block counts once, for the slowest tier that held a group's part of it."""
        order = {tier.name: rank for rank, tier in enumerate(self._stack.tiers)}
        slowest: dict[bytes, str] = {}
        for (_, name), tier in waiting.sources.items():
            if order[tier] >= order[slowest.get(name, tier)]:
                slowest[name] = tier
        for tier in slowest.values():
            self._hit_tokens[tier] += self._schedulers[0].cache.page_size

    def stats(self) -> dict[str, int]:
        """Hits by tier in tokens, bytes brought back, and stored tokens that were computed instead."""
        tokens = {f"kv_{name}.hit_tokens": count for name, count in self._hit_tokens.items()}
        return {
            **tokens,
            "kv_promoted_bytes": self._bytes_in,
            "kv_slower_tokens": self._slower * self._schedulers[0].cache.page_size,
            "kv_late_promotions": self._abandoned,
        }

    def close(self) -> None:
        """Ends the thread. Requests that still wait are let go."""
        for waiting in list(self._waiting.values()):
            self._cancel(waiting)
            self._let_go(waiting)
        self._fetcher.close()


def _room(group: GroupPages, promotion: Promotion) -> int:
    """Pages the group can lease without giving up what it holds of this prefix."""
    names = promotion.names[group.first_needed(promotion.count * group.page_size) : promotion.count]
    held = sum(1 for n in names if (b := group.index.find(n)) is not None and not group.pool.is_leased(b.page))
    return group.pool.available - held

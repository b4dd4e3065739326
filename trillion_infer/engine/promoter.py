"""Brings stored prefixes back while their requests wait: found and read by a thread, placed batch by batch."""

import queue
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, product

from trillion_infer.cache.group import GroupPages
from trillion_infer.cache.kv_cache import KVCache
from trillion_infer.cache.tiers.base import BlockKey, Tier, group_of, unit_of
from trillion_infer.cache.tiers.fetch import Batch, Fetcher, Load, Lookup, in_batches
from trillion_infer.cache.tiers.promotion import Promotion, plan_promotion
from trillion_infer.cache.tiers.stack import TierStack
from trillion_infer.core.request import Request, Status
from trillion_infer.engine.awaited import Arrival, Waiting
from trillion_infer.engine.layered import RunsByLayers
from trillion_infer.engine.page_copies import PageCopier
from trillion_infer.engine.ways import Ways
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


class Promoter:
    """Which stored blocks are worth bringing back for which request, and where each stands.

    A request whose prefix is looked for or on its way is held back by its scheduler; others start meanwhile. Blocks
    are placed in the order of depth, so what has come is of use even if the rest does not; or in the order of layers,
    where the request can run as they arrive (`steps`) and that is faster (`Ways`). A tier that was slower than
    computing the same tokens, by what both took lately, is passed over for RETRY_SECONDS.

    One thread, the engine's, owns it. For measurements: `chooses` = False brings everything back that is stored, and by
    layers wherever that can be, unless `may_run_by_layers` is False.
    """

    chooses = True
    may_run_by_layers = True

    def __init__(
        self,
        stack: TierStack,
        schedulers: Sequence[Scheduler],
        copier: PageCopier,
        steps: RunsByLayers | None = None,
    ):
        self._stack, self._schedulers, self._copier, self._steps = stack, schedulers, copier, steps
        self._units = copier.units
        self._bytes_of = {unit: copier.unit_bytes(unit) for units in self._units for unit in units}
        self._fetcher, self._ways = Fetcher(stack), Ways()
        self._is_idle = False
        self._watched: dict[Request, int] = {}
        self._done: dict[Request, int] = {}
        self._waiting: dict[Request, Waiting] = {}
        self._pinned: dict[Request, tuple[KVCache, list[bytes]]] = {}
        self._slow_until: dict[str, float] = {}
        self._seconds_per_token: float | None = None
        self._hit_tokens = {tier.name: 0 for tier in stack.tiers}
        self._bytes_in = self._slower = self._abandoned = 0
        self._layered = self._layered_ahead = self._layered_dropped = 0

    def watch(self, request: Request, shard: int) -> None:
        """A request was queued with a data shard."""
        self._watched[request] = shard

    def forget(self, request: Request) -> None:
        """It has ended."""
        self._watched.pop(request, None)
        self._done.pop(request, None)
        self._ways.forget(request)
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

    def record_result(self, requests: Iterable[Request]) -> None:
        """A step that these requests were in has a result."""
        for request in requests:
            self._ways.end(request)

    # The loop

    def arrivals(self, is_idle: bool) -> Iterator[Arrival]:
        """Blocks to place now: a batch if something else is being computed, else all that comes within a short wait."""
        self._is_idle = is_idle
        self._begin()
        for request in [request for request in self._pinned if request.status is not Status.WAITING]:
            self._unpin(request)
        for waiting in [waiting for waiting in self._waiting.values() if self._was_preempted(waiting)]:
            self._cancel(waiting)
            self._unpin(waiting.request)
            self._ways.forget(waiting.request)
            self._layered_dropped += 1
            del self._waiting[waiting.request]
        while self._waiting:
            for waiting in list(self._waiting.values()):
                while (arrival := self._next(waiting)) is not None:
                    yield arrival
                    if waiting.prefill is not None and waiting.prefill.is_sent:
                        self._let_run(waiting)
                    elif waiting.missing == 0:
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
            (unit, name)
            for group, units in zip(scheduler.cache.groups, self._units, strict=True)
            for name in names
            if name not in group.index
            for unit in units
        ]
        if not keys:
            self._done[request] = request.metrics.preemptions
            return
        lookup = Lookup(keys)
        deadline = time.monotonic() + PATIENCE_SECONDS
        self._waiting[request] = Waiting(request, shard, request.metrics.preemptions, lookup, deadline)
        scheduler.hold(request)
        if self._stack.is_instant:
            lookup.found = self._stack.locate(keys)
        else:
            self._fetcher.submit(lookup)
            self._fetcher.wait(LOOK_SECONDS)

    def _has_news(self, waiting: Waiting) -> bool:
        if waiting.load is None:
            return waiting.lookup.found is not None
        return not waiting.load.ready.empty()

    def _next(self, waiting: Waiting) -> Arrival | None:
        """A batch that came for one request. The caller plans anew when none is missing any more."""
        if waiting.load is None:
            if waiting.lookup.found is None:
                self._give_up_late(waiting)
                return None
            located = waiting.lookup.found
            worth = {tier for tier in set(located.values()) if self._pays(tier)}
            waiting.found = {key: tier for key, tier in located.items() if tier in worth}
            self._slower += (len(located) - len(waiting.found)) // len(self._bytes_of)
            self._plan(waiting)
        if waiting.load is None or waiting.request not in self._waiting:
            return None
        try:
            batch = waiting.load.ready.get_nowait()
        except queue.Empty:
            self._give_up_late(waiting)
            return None
        if waiting.by_layers is not None:
            return self._part_arrival(waiting, waiting.by_layers, batch)
        waiting.missing -= 1
        return self._arrival(waiting, batch)

    def _plan(self, waiting: Waiting) -> None:
        """What is still lacking starts to be read; without any the request may start."""
        cache = self._schedulers[waiting.shard].cache
        stored = {key for key in waiting.found if key not in waiting.lost}

        def is_stored(group: int, name: bytes) -> bool:
            return all((unit, name) in stored for unit in self._units[group])

        promotion = plan_promotion(cache, waiting.request, is_stored)
        if promotion is None or not any(promotion.lacking):
            self._let_go(waiting)
            return
        self._pin(waiting, cache, promotion)
        if self._runs_by_layers(waiting, promotion):
            parts = self._part_batches(promotion)
            waiting.by_layers, batches = [len(part) for part in parts], list(chain(*parts))
        else:
            waiting.by_layers, batches = None, []
            for group, units in enumerate(self._units):
                batches += in_batches(units, promotion.lacking_names(group), PAGES_PER_CALL)
        waiting.promotion, waiting.missing = promotion, len(batches)
        waiting.load = Load(batches, waiting.found)
        self._fetcher.submit(waiting.load)

    # By layers

    def _part_batches(self, promotion: Promotion) -> list[list[list[BlockKey]]]:
        """Batches of one unit each, by the part of the layers."""
        size, parts = self._copier.pages_per_part_call, range(self._copier.parts.count)
        groups = [(group, self._copier.parts.of(group)) for group in range(len(self._units))]
        return [
            [
                batch
                for group, own in groups
                if part in own
                for batch in in_batches([unit_of(group, part)], promotion.lacking_names(group), size)
            ]
            for part in parts
        ]

    def _runs_by_layers(self, waiting: Waiting, promotion: Promotion) -> bool:
        """Whether the first tokens are computed beside reading; whole blocks, until the speed of both is known. Where
        nothing else is going on, what it takes is measured."""
        may = self.may_run_by_layers and waiting.may_run_by_layers
        if self._steps is None or self._steps.parts.count == 1 or not may:
            self._ways.forget(waiting.request)
            return False
        new = self._steps.new_tokens(waiting.request, promotion)
        if new == 0 or not self.chooses:
            return new > 0
        lacking: dict[Tier, int] = {}
        for group, units in enumerate(self._units):
            for key in product(units, promotion.lacking_names(group)):
                tier = waiting.found[key]
                lacking[tier] = lacking.get(tier, 0) + self._bytes_of[key[0]]
        speeds = {tier: self._stack.seconds_per_byte(tier) for tier in lacking}
        if self._seconds_per_token is None or None in speeds.values():
            return False
        seconds = {tier: size * (speeds[tier] or 0.0) for tier, size in lacking.items()}
        read, slowest = sum(seconds.values()), max(seconds, key=lambda tier: seconds[tier]).name
        compute = self._seconds_per_token * new
        by_layers = self._ways.by_layers(slowest, read, compute, self._steps.parts.count)
        if self._is_idle and len(self._waiting) == 1:
            self._ways.begin(waiting.request, slowest, by_layers, read + compute)
        return by_layers

    def _part_arrival(self, waiting: Waiting, missing: list[int], batch: Batch) -> Arrival | None:
        """A batch of one part. The first one starts the request; where that cannot be, or what was stored is not there
        any more, whole blocks are read instead, into pages of nobody."""
        unit, promotion, steps = batch.keys[0][0], waiting.promotion, self._steps
        assert promotion is not None
        assert steps is not None
        lost = {
            key
            for key, content in zip(batch.keys, batch.contents, strict=True)
            if content is None or len(content[0]) != self._bytes_of[unit]
        }
        waiting.lost |= lost
        if waiting.prefill is None and not lost:
            waiting.prefill = steps.begin(waiting.request, waiting.shard, promotion, missing)
        prefill = waiting.prefill
        if prefill is None or lost:
            self._drop_prefill(waiting)
            self._plan(waiting)
            return None
        pages, contents = prefill.pages[group_of(unit)], []
        for key, content in zip(batch.keys, batch.contents, strict=True):
            if content is not None and key[1] in pages:
                contents.append((pages[key[1]], [content[0]]))
                waiting.sources[key] = content[1].name
                self._bytes_in += len(content[0])
        part = unit - unit_of(group_of(unit), 0)
        prefill.missing[part] -= 1
        waiting.missing -= 1
        if part == prefill.sent == 0 and prefill.is_ready and waiting.load is not None:
            self._layered_ahead += waiting.load.ready.qsize() < waiting.missing
        return Arrival(waiting.shard, unit, lambda: contents, prefill)

    def _drop_prefill(self, waiting: Waiting) -> None:
        """What runs by layers is given up; the request waits again, and for whole blocks if for any."""
        if waiting.load is not None:
            waiting.load.cancelled = True
        if waiting.prefill is not None:
            if not self._was_preempted(waiting):
                self._schedulers[waiting.shard].drop_layered(waiting.request)
            waiting.prefill = None
            waiting.sources.clear()
            self._layered_dropped += 1
        waiting.may_run_by_layers = False
        self._ways.forget(waiting.request)

    def _was_preempted(self, waiting: Waiting) -> bool:
        """Its pages were taken from a request that runs by layers."""
        return waiting.prefill is not None and not self._schedulers[waiting.shard].is_layered(waiting.request)

    def _let_run(self, waiting: Waiting) -> None:
        """All of its layers are sent."""
        self._layered += 1
        self._end(waiting)

    # Whole blocks

    def _arrival(self, waiting: Waiting, batch: Batch) -> Arrival:
        number, promotion = group_of(batch.keys[0][0]), waiting.promotion
        assert promotion is not None
        group, count = self._schedulers[waiting.shard].cache.groups[number], len(self._units[number])

        def restore() -> list[tuple[int, list[bytes]]]:
            depths = {promotion.names[block]: block for block in promotion.lacking[number]}
            whole: dict[int, list[bytes]] = {}
            for start in range(0, len(batch.keys), count):
                keys, name = batch.keys[start : start + count], batch.keys[start][1]
                units = [content for content in batch.contents[start : start + count] if content is not None]
                sizes = [len(content) for content, _ in units]
                intact = sizes == [self._bytes_of[unit] for unit, _ in keys]
                if intact and name not in group.index and len(whole) + 1 < _room(group, promotion):
                    whole[depths[name]] = [content for content, _ in units]
                    waiting.sources |= {key: tier.name for key, (_, tier) in zip(keys, units, strict=True)}
                    self._bytes_in += sum(sizes)
                else:
                    waiting.lost.update(keys)
            return [(page, whole[depth]) for depth, page in group.restore(promotion.names, sorted(whole))]

        return Arrival(waiting.shard, batch.keys[0][0], restore)

    def _pays(self, tier: Tier) -> bool:
        """Reading a block of every group takes less than computing its tokens, as far as both are known."""
        read, compute = self._stack.seconds_per_byte(tier), self._seconds_per_token
        now = time.monotonic()
        if not self.chooses:
            return True
        if now < self._slow_until.get(tier.name, 0.0):
            return False
        page_size = self._schedulers[0].cache.page_size
        if read is None or compute is None or read * sum(self._bytes_of.values()) <= compute * page_size:
            return True
        if tier.name in self._slow_until:
            del self._slow_until[tier.name]  # its time is over: one more try, which measures it again
            return True
        self._slow_until[tier.name] = now + RETRY_SECONDS
        return False

    # Ends

    def drop(self, is_unwanted: Callable[[bytes], bool]) -> None:
        """Requests of whose blocks some are deleted are let go; they compute what the device does not have."""
        for waiting in list(self._waiting.values()):
            if any(is_unwanted(name) for name in waiting.request.block_names):
                self._stop(waiting)

    def _give_up_late(self, waiting: Waiting) -> None:
        if time.monotonic() > waiting.deadline:
            self._abandoned += 1
            self._stop(waiting)

    def _stop(self, waiting: Waiting) -> None:
        self._drop_prefill(waiting)
        self._cancel(waiting)
        self._let_go(waiting)

    def _let_go(self, waiting: Waiting) -> None:
        self._schedulers[waiting.shard].hold(waiting.request, False)
        self._end(waiting)

    def _end(self, waiting: Waiting) -> None:
        request = waiting.request
        self._waiting.pop(request, None)
        self._done[request] = waiting.preemptions
        self._pinned[request] = (self._schedulers[waiting.shard].cache, waiting.pinned)
        self._count(waiting)

    def _cancel(self, waiting: Waiting) -> None:
        waiting.lookup.cancelled = True
        if waiting.load is not None:
            waiting.load.cancelled = True
        self._pinned.setdefault(waiting.request, (self._schedulers[waiting.shard].cache, waiting.pinned))

    def _pin(self, waiting: Waiting, cache: KVCache, promotion: Promotion) -> None:
        names = promotion.names[: promotion.count]
        cache.pin(waiting.pinned, -1)
        cache.pin(names)
        waiting.pinned = names

    def _unpin(self, request: Request) -> None:
        cache, names = self._pinned.pop(request, (None, []))
        if cache is not None:
            cache.pin(names, -1)

    def _count(self, waiting: Waiting) -> None:
        """A block counts once, for the slowest tier that held a part of it."""
        order = {tier.name: rank for rank, tier in enumerate(self._stack.tiers)}
        slowest: dict[bytes, str] = {}
        for (_, name), tier in waiting.sources.items():
            if order[tier] >= order[slowest.get(name, tier)]:
                slowest[name] = tier
        for tier in slowest.values():
            self._hit_tokens[tier] += self._schedulers[0].cache.page_size

    def stats(self) -> dict[str, int]:
        """Hits by tier in tokens, bytes brought back, and stored tokens that were computed instead.

        kv_layered_prefills: first steps sent some layers at a time, _ahead: of which the first layers were sent while
        others were still being read, _dropped: begun and given up.
        """
        tokens = {f"kv_{name}.hit_tokens": count for name, count in self._hit_tokens.items()}
        return {
            **tokens,
            "kv_promoted_bytes": self._bytes_in,
            "kv_slower_tokens": self._slower * self._schedulers[0].cache.page_size,
            "kv_late_promotions": self._abandoned,
            "kv_layered_prefills": self._layered,
            "kv_layered_ahead": self._layered_ahead,
            "kv_layered_dropped": self._layered_dropped,
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

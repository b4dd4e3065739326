"""Prefill and decode on disjoint meshes of one process: prompts on one, tokens on the other, KV device to device."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import Mesh

from trillion_infer.cache.group import HeldPages
from trillion_infer.core.request import Request, Status
from trillion_infer.engine.engine import Engine, TokenEvent
from trillion_infer.engine.keeping import KeepsBlocksOf
from trillion_infer.transfer.pages import PageMover

Moved = list[list[tuple[int, Any]]]
"""Data on its way, by pool: (pages, array) blocks."""

Pages = list[tuple[int, list[int]]]
"""By pool: the first block held, and the pages of it and those after it."""


class PrefillEngine(Engine):
    """An engine whose requests end with their first token; remembers the pages they held then."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.held: dict[str, Pages] = {}

    def finish(self, request: Request, status: Status, stop_reason: int | str | None = None) -> None:
        scheduler = self._owner.get(request.request_id)
        if scheduler is not None and status is Status.FINISHED_LENGTH:
            pages = [(held.first, list(held.pages)) for held in scheduler.cache.held(request)]
            self.held[request.request_id] = pages
        super().finish(request, status, stop_reason)


@dataclass
class _Handoff:
    """A prompt that is computed and waits for room in a decode pool."""

    request: Request
    source: int
    pages: Pages
    moved: Moved
    ready: float


@dataclass
class TransferFigures:
    """What hand-offs cost. pages_found: not sent, since the decode pool had them. waiting_s: for room there."""

    handoffs: int = 0
    pages: int = 0
    pages_found: int = 0
    waiting_s: float = 0.0


class DisaggregatedEngine(KeepsBlocksOf):
    """Looks like an Engine. Prompts go to the prefill engine with the fewest queued tokens, and on to the decode engine
    with the most free pages; `movers[i][j]` moves pages from prefill engine i to decode engine j.

    A prompt is not started unless a decode engine can take its whole KV together with all that is on its way. Its
    pages are read in the order of the device's steps right after its last chunk, before anyone else can be given
    them, so no lease is needed within a process. Blocks the decode engine's prefix index holds are not sent.
    """

    def __init__(
        self, prefill: Sequence[PrefillEngine], decode: Sequence[Engine], movers: Sequence[Sequence[PageMover]]
    ):
        self.prefill, self.decode, self.movers = list(prefill), list(decode), movers
        self._waiting: deque[Request] = deque()
        self._computing: dict[str, tuple[Request, Request, int, int]] = {}
        self._handoffs: deque[_Handoff] = deque()
        self._decoding: dict[str, int] = {}
        self.figures = TransferFigures()

    @property
    def engines(self) -> list[Engine]:
        return [*self.prefill, *self.decode]

    @property
    def parts(self) -> list[Engine]:
        return [*self.decode, *self.prefill]

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._computing or self._handoffs) or any(e.has_work for e in self.engines)

    def add(self, request: Request) -> None:
        """Queue a request; refuses what no pool can ever hold."""
        for engine in (self.prefill[0], self.decode[0]):
            engine.schedulers[0].check(request)
        self._waiting.append(request)

    def abort(self, request_id: str) -> Request | None:
        """End a request wherever it stands, in both pools."""
        request = self._withdraw(request_id)
        if request is not None and not request.status.is_finished:
            request.status = Status.FINISHED_ABORT
        return request

    def finish(self, request: Request, status: Status, stop_reason: int | str | None = None) -> None:
        """End a request that a stop string ended."""
        place = self._decoding.pop(request.request_id, None)
        if place is not None:
            self.decode[place].finish(request, status, stop_reason)
            return
        self._withdraw(request.request_id)
        request.status, request.stop_reason = status, stop_reason

    def _withdraw(self, request_id: str) -> Request | None:
        for request in self._waiting:
            if request.request_id == request_id:
                self._waiting.remove(request)
                return request
        if request_id in self._computing:
            request, _, source, _ = self._computing.pop(request_id)
            self.prefill[source].abort(request_id)
            return request
        for handoff in self._handoffs:
            if handoff.request.request_id == request_id:
                self._handoffs.remove(handoff)
                return handoff.request
        place = self._decoding.pop(request_id, None)
        return None if place is None else self.decode[place].abort(request_id)

    # The loop

    def step(self) -> list[TokenEvent]:
        """One step of every pool that has work; decode first, so that tokens in flight do not wait for prompts."""
        events: list[TokenEvent] = []
        for engine in self.decode:
            events += [event for event in engine.step() if self._keep(event)]
        self._start_prompts()
        for source, engine in enumerate(self.prefill):
            for event in engine.step():
                events += self._prefilled(source, event)
        self._hand_over()
        return events

    def _keep(self, event: TokenEvent) -> bool:
        if event.finished is not None:
            self._decoding.pop(event.request.request_id, None)
        return True

    def _start_prompts(self) -> None:
        """Sends waiting prompts to prefill while a decode pool can take them."""
        while self._waiting:
            request = self._waiting[0]
            target = self._room_for(request)
            if target is None:
                return
            self._waiting.popleft()
            source = min(range(len(self.prefill)), key=lambda i: self.prefill[i].queued_tokens())
            twin = replace(request, max_tokens=1, output_ids=[], block_names=[])
            self._computing[request.request_id] = (request, twin, source, target)
            self.prefill[source].add(twin)

    def _room_for(self, request: Request) -> int | None:
        """The decode engine with the most free pages that can take the request's prompt beside all promised ones."""
        best, most = None, -1
        promised = [[0, 0] for _ in self.decode]
        for other, _, _, target in self._computing.values():
            promised[target][0] += 1
            promised[target][1] += other.num_known + 1
        for handoff in self._handoffs:
            for promise in promised:
                promise[0] += 1
                promise[1] += handoff.request.num_known + 1
        for place, engine in enumerate(self.decode):
            scheduler = engine.schedulers[0]
            slots = scheduler.config.max_running - scheduler.num_running - promised[place][0]
            size = scheduler.cache.page_size
            pages = min(group.pool.available for group in scheduler.cache.groups) - -(-promised[place][1] // size)
            idle = scheduler.num_running == 0 and promised[place][0] == 0
            if slots > 0 and (idle or pages >= -(-(request.num_known + 1) // size)) and pages > most:
                best, most = place, pages
        return best

    def _prefilled(self, source: int, event: TokenEvent) -> list[TokenEvent]:
        """The first token of a prompt: passed on as the request's own, and its KV sent on its way."""
        entry = self._computing.pop(event.request.request_id, None)
        if entry is None:
            return []
        request, twin, _, target = entry
        request.num_cached_tokens = twin.num_cached_tokens
        request.output_ids.extend(event.token_ids)
        pages = self.prefill[source].held.pop(request.request_id, None)
        ended = event.finished is not Status.FINISHED_LENGTH or request.max_tokens == 1
        event = replace(event, request=request, finished=event.finished if ended else None)
        if ended or pages is None:
            request.status = event.finished or Status.FINISHED_LENGTH
            return [event]
        request.status = Status.WAITING
        if not self._adopt(request, source, pages, None):
            moved = self.movers[source][target].take(self.prefill[source].pools, [ids for _, ids in pages])
            self._handoffs.append(_Handoff(request, source, pages, moved, time.monotonic()))
        return [event]

    def _hand_over(self) -> None:
        """Gives computed prompts to decode engines that have a slot and pages; the rest wait their turn."""
        for _ in range(len(self._handoffs)):
            handoff = self._handoffs.popleft()
            if self._adopt(handoff.request, handoff.source, handoff.pages, handoff.moved):
                self.figures.waiting_s += time.monotonic() - handoff.ready
            else:
                self._handoffs.append(handoff)

    def _adopt(self, request: Request, source: int, pages: Pages, moved: Moved | None) -> bool:
        """Starts a computed prompt on the decode engine with the fewest requests that has room for it.

        `moved`: all its pages, taken earlier; None: they are still in the prefill pool, and only those that the decode
        pool lacks are taken.
        """
        for place in sorted(range(len(self.decode)), key=lambda i: self.decode[i].schedulers[0].num_running):
            engine, mover = self.decode[place], self.movers[source][place]
            hit = engine.adopt(request, len(request.prompt_ids))
            if hit is None:
                continue
            cache = engine.schedulers[0].cache
            lacking = hit // cache.page_size
            targets = [
                [_page(held, block, lacking, pool) for block in range(first, first + len(ids))]
                for (first, ids), held, pool in zip(pages, cache.held(request), engine.pools, strict=True)
            ]
            if moved is None:
                pairs = [
                    [(i, t) for i, t in zip(ids, to, strict=True) if t < pool.shape[1]]
                    for (_, ids), to, pool in zip(pages, targets, engine.pools, strict=True)
                ]
                moved = mover.take(self.prefill[source].pools, [[i for i, _ in pair] for pair in pairs])
                targets = [[t for _, t in pair] for pair in pairs]
            engine.replace_pools(mover.put(engine.pools, targets, moved))
            self._decoding[request.request_id] = place
            self.figures.handoffs += 1
            self.figures.pages += sum(len(ids) for ids in targets)
            self.figures.pages_found += lacking
            return True
        return False

    # Figures

    def stats(self) -> dict[str, float]:
        """Sums over all engines, with hand-offs and pages moved."""
        total: dict[str, float] = {"handoffs": self.figures.handoffs, "waiting_prompts": len(self._waiting)}
        for engine in self.engines:
            for name, value in engine.stats().items():
                total[name] = total.get(name, 0) + value
        for name in [name for name in total if name.endswith(".acceptance_length")]:
            drafter = name.removesuffix(".acceptance_length")
            total[name] = 1 + total[f"{drafter}.accepted"] / total[f"{drafter}.drafts"]
            total[f"{drafter}.acceptance_rate"] = total[f"{drafter}.accepted"] / total[f"{drafter}.proposed"]
        total["kv_pages_moved"], total["kv_pages_found"] = self.figures.pages, self.figures.pages_found
        total["kv_bytes_moved"] = sum(mover.bytes_moved for row in self.movers for mover in row)
        return total

    def meshes(self) -> list[tuple[str, Mesh]]:
        """The meshes of each role."""
        roles = (("prefill", self.prefill), ("decode", self.decode))
        return [(role, engine.programs.mesh) for role, engines in roles for engine in engines]

    def memory(self) -> dict[str, int]:
        """Bytes by holder, the pools of each role apart."""
        total: dict[str, int] = {}
        for role, engines in (("prefill", self.prefill), ("decode", self.decode)):
            for engine in engines:
                for name, value in engine.memory().items():
                    total[f"{role}.{name}"] = total.get(f"{role}.{name}", 0) + value
        return total

    def wake_by(self, wake: Callable[[], None]) -> None:
        """As Engine.wake_by."""

    def drain(self) -> None:
        for engine in self.engines:
            engine.drain()

    def close(self) -> None:
        for engine in self.engines:
            engine.close()

    def check_integrity(self) -> None:
        for engine in self.engines:
            engine.check_integrity()


def _page(held: HeldPages, block: int, found: int, pool: Any) -> int:
    """The page a block goes to; one past the pool's end for blocks that are found already or no longer in view."""
    page = held.page(block) if block >= found else None
    return pool.shape[1] if page is None else page

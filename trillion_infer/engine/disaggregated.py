"""Prefill and decode on disjoint meshes of one process: prompts on one, tokens on the other, KV device to device."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import Mesh

from trillion_infer.cache.group import HeldPages
from trillion_infer.core.request import Request, Status
from trillion_infer.engine.engine import Engine
from trillion_infer.engine.events import TokenEvent
from trillion_infer.engine.keeping import KeepsBlocksOf
from trillion_infer.engine.page_transfers import Piece, PromptJob
from trillion_infer.engine.timeline import Timeline
from trillion_infer.transfer.pages import PAGES_PER_CALL, PageMover

STEPS_AHEAD = 2
"""Steps' worth of prompt tokens that a prefill engine is given; reserving pages for more would keep them idle."""


class PrefillEngine(Engine):
    """An engine whose requests end with their first token; remembers the pages they held then."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.held: dict[str, list[HeldPages]] = {}

    def finish(self, request: Request, status: Status, stop_reason: int | str | None = None) -> None:
        scheduler = self._owner.get(request.request_id)
        if scheduler is not None and status is Status.FINISHED_LENGTH:
            held = [HeldPages(each.first, list(each.pages)) for each in scheduler.cache.held(request)]
            self.held[request.request_id] = held
        super().finish(request, status, stop_reason)


@dataclass
class TransferFigures:
    """What hand-offs cost. pages_found: not sent, since the decode pool had them. exposed_s: from the end of prefill
    until all pages were there, when each first token had to wait for its second."""

    handoffs: int = 0
    pages: int = 0
    pages_found: int = 0
    bytes: int = 0
    transfer_s: float = 0.0
    exposed_s: float = 0.0


class DisaggregatedEngine(KeepsBlocksOf):
    """Looks like an Engine. Prompts go to the prefill engine with the fewest queued tokens, and on to the decode engine
    with the most free pages; `movers[i][j]` moves pages from prefill engine i to decode engine j.

    A prompt is started when a decode engine has reserved all pages of its KV. Finished blocks are read in the order of
    the prefill device's steps, before anyone else can be given their pages, so no lease is needed within a process;
    they travel while later chunks compute, and are put in place when they have arrived, so that no decode step waits
    for them. Blocks the decode engine's prefix index holds are not sent. No pool's step waits for another pool's.
    """

    def __init__(
        self, prefill: Sequence[PrefillEngine], decode: Sequence[Engine], movers: Sequence[Sequence[PageMover]]
    ):
        self.prefill, self.decode, self.movers = list(prefill), list(decode), movers
        self._waiting: deque[Request] = deque()
        self._jobs: dict[str, PromptJob] = {}
        self._decoding: dict[str, int] = {}
        self.figures = TransferFigures()
        roles = (("prefill", len(self.prefill)), ("decode", len(self.decode)))
        self._timelines = {role: [Timeline(f"{role} {i}") for i in range(count)] for role, count in roles}

    @property
    def engines(self) -> list[Engine]:
        return [*self.prefill, *self.decode]

    @property
    def parts(self) -> list[Engine]:
        return [*self.decode, *self.prefill]

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._jobs) or any(e.has_work for e in self.engines)

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
        place = self._decoding.get(request.request_id)
        if place is not None:
            self.decode[place].finish(request, status, stop_reason)
            self._ended(request)
            return
        self._withdraw(request.request_id)
        request.status, request.stop_reason = status, stop_reason

    def _withdraw(self, request_id: str) -> Request | None:
        for request in self._waiting:
            if request.request_id == request_id:
                self._waiting.remove(request)
                return request
        job = self._jobs.pop(request_id, None)
        if job is not None:
            self.prefill[job.source].abort(request_id)
            self.decode[job.target].schedulers[0].unreserve(job.request)
            return job.request
        place = self._decoding.pop(request_id, None)
        return None if place is None else self.decode[place].abort(request_id)

    # The loop

    def step(self) -> list[TokenEvent]:
        """One step of every pool that has work and is not busy; where all are, waits for one of them."""
        sent = sum(engine.steps for engine in self.engines)
        events, arrived = self._round(), self.figures.pages
        if events or sent != sum(engine.steps for engine in self.engines) or arrived != self.figures.pages:
            return events
        return self._wait()

    def _round(self) -> list[TokenEvent]:
        """Decode first, so that tokens in flight do not wait for prompts."""
        events: list[TokenEvent] = []
        for engine in self.decode:
            events += self._decoded(engine.step(waits=False))
        self._start_prompts()
        for source, engine in enumerate(self.prefill):
            events += self._prefilled(source, engine.step(waits=False))
            self._send_finished(source)
        self._place_arrived()
        return events

    def _wait(self) -> list[TokenEvent]:
        """Waits for the next token, else for pages on their way, else for a chunk."""
        for engine in self.decode:
            if engine.is_in_flight:
                return self._decoded(engine.step())
        piece = next((job.pieces[0] for job in self._jobs.values() if job.pieces), None)
        if piece is not None:
            piece.wait()
            return []
        source = next((i for i, engine in enumerate(self.prefill) if engine.has_work), None)
        return [] if source is None else self._prefilled(source, self.prefill[source].step())

    def _decoded(self, events: list[TokenEvent]) -> list[TokenEvent]:
        for event in events:
            if event.finished is not None:
                self._ended(event.request)
        return events

    def _ended(self, request: Request) -> None:
        place, marks = self._decoding.pop(request.request_id, None), request.metrics
        if place is not None and marks.first_token_time is not None and marks.last_token_time is not None:
            begun, end, count = marks.first_token_time, marks.last_token_time, len(request.output_ids)
            self._timelines["decode"][place].add("decode", request.request_id, begun, end, tokens=count)

    # Prompts

    def _start_prompts(self) -> None:
        """Gives prefill engines what they can compute soon and decode engines have room for, in order.

        A prompt whose prefix is on its way to the decode engine is passed over until it can be shared.
        """
        for request in list(self._waiting):
            source = min(range(len(self.prefill)), key=lambda i: self.prefill[i].queued_tokens())
            engine = self.prefill[source]
            if engine.queued_tokens() >= STEPS_AHEAD * engine.schedulers[0].config.prefill_chunk:
                return
            place = self._most_room()
            if place is None:
                return
            cache = self.decode[place].schedulers[0].cache
            if cache.awaited(request) is not None:
                continue
            hit = self.decode[place].schedulers[0].reserve(request, len(request.prompt_ids), by_growth=True)
            if hit is None:
                return
            self._waiting.remove(request)
            found = hit // cache.page_size
            twin = replace(request, max_tokens=1, output_ids=[], block_names=[], slot=-1, num_computed=0)
            job = PromptJob(
                request, twin, source, place, found, [found] * len(self.movers[source][place].groups), found
            )
            job.marks.reserved = time.monotonic()
            self._jobs[request.request_id] = job
            self.figures.pages_found += found
            engine.add(twin)

    def _most_room(self) -> int | None:
        """The decode engine with the most free pages; engines that wait for room themselves take nobody."""
        schedulers = [engine.schedulers[0] for engine in self.decode]
        able = [i for i, scheduler in enumerate(schedulers) if scheduler.num_waiting == 0]
        return max(able, key=lambda i: min(g.pool.available for g in schedulers[i].cache.groups), default=None)

    def _prefilled(self, source: int, events: list[TokenEvent]) -> list[TokenEvent]:
        """First tokens of prompts, passed on as the requests' own; the rest of their KV is sent on its way."""
        return [out for event in events if (out := self._first_token(source, event)) is not None]

    def _first_token(self, source: int, event: TokenEvent) -> TokenEvent | None:
        held = self.prefill[source].held.pop(event.request.request_id, None)
        job = self._jobs.get(event.request.request_id)
        if job is None:
            return None
        request, now = job.request, time.monotonic()
        request.num_cached_tokens = job.twin.num_cached_tokens
        request.output_ids.extend(event.token_ids)
        ended = event.finished is not Status.FINISHED_LENGTH or request.max_tokens == 1
        self._note_prefill(job, now)
        if ended or held is None:
            del self._jobs[request.request_id]
            self.decode[job.target].schedulers[0].unreserve(request)
            request.status = event.finished or Status.FINISHED_LENGTH
            return replace(event, request=request, finished=event.finished)
        job.is_computed, job.marks.offered = True, now
        for pool, group in enumerate(self.movers[source][job.target].groups):
            is_full, pages = self.prefill[source].schedulers[0].cache.groups[group].group.is_full, held[group]
            self._send(job, pool, job.sent if is_full else max(pages.first, job.found), pages.end, pages)
        return replace(event, request=request, finished=None)

    def _note_prefill(self, job: PromptJob, now: float) -> None:
        line, marks, name = self._timelines["prefill"][job.source], job.request.metrics, job.request.request_id
        begun = marks.first_scheduled_time or now
        line.add("queue", name, marks.arrival_time, begun)
        line.add("prefill", name, begun, now, tokens=len(job.request.prompt_ids))

    # Pages

    def _send_finished(self, source: int) -> None:
        """Sends whole batches of blocks that the chunks so far finish, of groups whose pages stay until the end."""
        cache = self.prefill[source].schedulers[0].cache
        for job in self._jobs.values():
            if job.source != source or job.twin.status is not Status.RUNNING:
                continue
            done = job.twin.num_computed // cache.page_size
            end = job.sent + max(0, done - job.sent) // PAGES_PER_CALL * PAGES_PER_CALL
            held = cache.held(job.twin)
            for pool, group in enumerate(self.movers[source][job.target].groups):
                if cache.groups[group].group.is_full:
                    self._send(job, pool, job.sent, end, held[group])
            job.sent = end

    def _send(self, job: PromptJob, pool: int, start: int, end: int, held: HeldPages) -> None:
        """Starts moving the blocks [start, end) of a pool into the pages that are reserved for them."""
        engine, mover = self.prefill[job.source], self.movers[job.source][job.target]
        target = self.decode[job.target].schedulers[0].cache.held(job.request)[mover.groups[pool]]
        start = max(start, target.first)
        for first in range(start, end, PAGES_PER_CALL):
            blocks = range(first, min(end, first + PAGES_PER_CALL))
            pages, targets = [held.page(b) for b in blocks], [target.page(b) for b in blocks]
            assert None not in (*pages, *targets), "a block to hand over has no page"
            read = mover.take(pool, engine.all_pools[pool], pages)  # pyright: ignore[reportArgumentType]
            data = None if mover.is_shared else mover.send(read)
            job.pieces.append(Piece(pool, first, targets, read, time.monotonic(), data))  # pyright: ignore[reportArgumentType]

    def _place_arrived(self) -> None:
        """Puts pages that have arrived in place; prompts all of whose pages are there go on in their decode engine."""
        for job in list(self._jobs.values()):
            mover, now = self.movers[job.source][job.target], time.monotonic()
            while job.pieces and job.pieces[0].has_arrived(mover, now):
                self._place(job, job.pieces.popleft(), now)
            if job.is_computed and not job.pieces:
                self._activate(job)

    def _place(self, job: PromptJob, piece: Piece, now: float) -> None:
        engine, request, data = self.decode[job.target], job.request, piece.data
        mover, cache = self.movers[job.source][job.target], engine.schedulers[0].cache
        assert data is not None, "pages are put in place before they were sent"
        if engine.tiering is not None:
            engine.tiering.save_evicted(engine.all_pools)
        pools = list(engine.all_pools)
        pools[piece.pool] = mover.put(piece.pool, pools[piece.pool], piece.targets, data)
        engine.replace_pools(tuple(pools))
        job.count(piece, data.nbytes, now)
        self.figures.pages += len(piece.targets)
        self.figures.bytes += data.nbytes
        line = self._timelines["decode"][job.target]
        line.add("transfer", request.request_id, piece.begun, now, bytes=data.nbytes, block=piece.first)
        if all(group.group.is_full for group in cache.groups):
            request.num_computed = min(job.landed) * cache.page_size
            cache.commit(request)

    def _activate(self, job: PromptJob) -> None:
        request, marks = job.request, job.marks
        del self._jobs[request.request_id]
        marks.arrived = time.monotonic()
        request.metrics.handoff = marks
        self.decode[job.target].activate(request, len(request.prompt_ids))
        self._decoding[request.request_id] = job.target
        self.figures.handoffs += 1
        self.figures.transfer_s += marks.transfer_s
        self.figures.exposed_s += marks.exposed_s or 0.0

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
        total["kv_bytes_moved"] = self.figures.bytes
        return total

    def trace_events(self) -> list[dict[str, Any]]:
        """The newest spans of every engine, in the Chrome trace format."""
        return [event for lines in self._timelines.values() for line in lines for event in line.events()]

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

    def wait_for_programs(self) -> None:
        """As Engine.wait_for_programs, of all engines."""
        for engine in self.engines:
            engine.wait_for_programs()

    def drain(self) -> None:
        for engine in self.engines:
            engine.drain()

    def close(self) -> None:
        for request_id in list(self._jobs):
            self.abort(request_id)
        for engine in self.engines:
            engine.close()

    def check_integrity(self) -> None:
        """Raises AssertionError if a page, slot or request is lost."""
        for engine in self.engines:
            engine.check_integrity()

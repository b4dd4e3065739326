"""An engine that hands prompts to other workers or takes them from these: what `Generator` drives in a pool."""

import queue
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from trillion_infer.core.errors import ConfigError, QueueFullError
from trillion_infer.core.request import Request, Status
from trillion_infer.engine.engine import Engine
from trillion_infer.engine.events import TokenEvent
from trillion_infer.engine.handoff.decode import DecodeJobs
from trillion_infer.engine.handoff.prefill import PrefillJobs
from trillion_infer.engine.keeping import KeepsBlocksOf
from trillion_infer.engine.timeline import Timeline
from trillion_infer.transfer.handoff.decode_side import DecodeSide
from trillion_infer.transfer.handoff.links import LinkEvent, Links
from trillion_infer.transfer.handoff.prefill_side import PrefillSide
from trillion_infer.transfer.transports.base import Transport

ROLES = ("prefill", "decode", "both")
IDLE_S = 0.003
"""Seconds that a step waits for messages when the device has nothing to do."""


class HandoffEngine(KeepsBlocksOf):
    """Looks like an Engine; one thread owns it.

    role: `prefill` computes prompts for decode workers and refuses clients; `decode` has prompts computed by prefill
    workers and decodes them; `both` serves clients alone and computes prompts for others, too. peers: the prefill
    workers to ask; without any, those that requests name.
    """

    def __init__(
        self,
        engine: Engine,
        role: str,
        links: Links,
        transport: Transport,
        sides: tuple[PrefillSide, DecodeSide],
        jobs: tuple[PrefillJobs, DecodeJobs],
        timeline: Timeline,
        peers: tuple[str, ...] = (),
    ):
        check_role(role)
        self.engine, self.links, self.transport, self.timeline = engine, links, transport, timeline
        self.prefill_side, self.decode_side = sides
        self.prefill_jobs, self.decode_jobs = jobs
        self.role, self._next_role = role, role
        self._peers_are_fixed = bool(peers)
        links.dial(peers)
        self._waiting: deque[Request] = deque()
        self._aborted: list[TokenEvent] = []
        self._decoding: dict[str, float] = {}
        self.prefill_side.accepts = role != "decode"

    # Roles

    @property
    def next_role(self) -> str:
        """The role it will have once it has been drained; the present one if no change is under way."""
        return self._next_role

    def switch(self, role: str) -> None:
        """Takes no work of the old role any more, ends what it has, then changes. Raises ConfigError."""
        check_role(role)
        self._next_role = role
        self.prefill_side.accepts = role != "decode"
        self._settle_role()

    def _settle_role(self) -> None:
        clients = self._waiting or self.decode_jobs.num_reserved or self._decoding
        if self.role != self._next_role:
            lets_go = {"prefill": bool(self.prefill_side.num_jobs), "decode": bool(clients)}
            if self._next_role == "decode" and lets_go["prefill"]:
                return
            if self._next_role == "prefill" and lets_go["decode"]:
                return
            self.role = self._next_role

    # Requests

    def meshes(self) -> list[tuple[str, Mesh]]:
        """The mesh of its role."""
        return [(self.role, mesh) for _, mesh in self.engine.meshes()]

    @property
    def parts(self) -> list[Engine]:
        return [self.engine]

    @property
    def has_work(self) -> bool:
        return bool(
            self.engine.has_work
            or self._waiting
            or self._aborted
            or self.decode_jobs.events
            or self.decode_side.num_waiting
            or self.prefill_side.num_jobs
            or self.role != self._next_role
            or not self.links.inbox.empty()
        )

    def add(self, request: Request) -> None:
        """Queue a request. Raises what Scheduler.add raises, and QueueFullError in a worker that only prefills."""
        if "prefill" in (self.role, self._next_role):
            raise QueueFullError("this worker prefills for others and takes no requests; send them to a decode worker.")
        if self.role == "both" or request.params.prompt_logprobs is not None or len(request.prompt_ids) < 2:
            self.engine.add(request)
        else:
            self.engine.schedulers[0].check(request)
            self._waiting.append(request)
        self._decoding[request.request_id] = time.monotonic()

    def abort(self, request_id: str) -> Request | None:
        """End a request wherever it stands, here and at the worker that prefills for it."""
        self._decoding.pop(request_id, None)
        request = next((r for r in self._waiting if r.request_id == request_id), None)
        if request is not None:
            self._waiting.remove(request)
        else:
            self.decode_side.abort(request_id)
            request = self.decode_jobs.withdraw(request_id)
            self._flush()
        if request is None:
            return self.engine.abort(request_id)
        request.status = Status.FINISHED_ABORT
        return request

    def finish(self, request: Request, status: Status, stop_reason: int | str | None = None) -> None:
        """End a request that a stop string ended."""
        self.engine.finish(request, status, stop_reason)
        self._ended(request)

    # The loop

    def step(self) -> list[TokenEvent]:
        """Handles messages, then one step of the device; waits a little for messages where there is no such step."""
        with self.engine.guarded():
            return self._step()

    def _step(self) -> list[TokenEvent]:
        self._read()
        now = time.monotonic()
        self._reserve(now)
        self.prefill_side.tick(now)
        self.decode_side.tick(now)
        self.decode_jobs.poll(self.decode_side, now)
        events = self._device_step()
        self.prefill_jobs.advance(self.prefill_side, time.monotonic())
        events += self.decode_jobs.events
        self.decode_jobs.events = []
        for event in events:
            if event.finished is not None:
                self._ended(event.request)
        self._settle_role()
        self._flush()
        if not self.engine.has_work and not events and self.links.inbox.empty():
            self._read(IDLE_S)
        return events

    def _device_step(self) -> list[TokenEvent]:
        if not self.engine.has_work:
            return []
        return [event for event in self.engine.step() if not self.prefill_jobs.is_own(event.request)]

    def _ended(self, request: Request) -> None:
        began = self._decoding.pop(request.request_id, None)
        first, last = request.metrics.first_token_time, request.metrics.last_token_time
        if began is not None and first is not None and last is not None:
            self.timeline.add("decode", request.request_id, first, last, tokens=len(request.output_ids))

    def _reserve(self, now: float) -> None:
        while self._waiting:
            request = self._waiting[0]
            if not self._peers_are_fixed:
                self.links.dial(request.peers)
            if not self.decode_jobs.reserve(request, self.decode_side, now):
                return
            self._waiting.popleft()

    def _read(self, wait_s: float = 0.0) -> None:
        """Hands waiting messages to the side they are for."""
        while True:
            try:
                event = self.links.inbox.get(timeout=wait_s) if wait_s else self.links.inbox.get_nowait()
            except queue.Empty:
                return
            wait_s = 0.0
            self._handle(event, time.monotonic())

    def _handle(self, event: LinkEvent, now: float) -> None:
        side = self.decode_side if event.asks else self.prefill_side
        if event.message is not None:
            side.receive(event.peer, event.identity.epoch, event.message, now)
        elif event.is_open:
            if event.asks:
                self.decode_jobs.identities[event.peer] = event.identity
            side.connected(event.peer, event.identity.epoch, now)
        else:
            side.disconnected(event.peer, now)

    def _flush(self) -> None:
        for side, asks in ((self.prefill_side, False), (self.decode_side, True)):
            sent, side.outbox = side.outbox, []
            for peer, message in sent:
                self.links.send(peer, asks, message)

    def wake_by(self, wake: Callable[[], None]) -> None:
        """Calls `wake`, from any thread, when there is a message."""
        self.links.wake = wake

    # Figures, end

    def stats(self) -> dict[str, float]:
        """The engine's figures, and `handoff.*`: what was asked, leased, retried, moved, and what went wrong."""
        decode, sides = self.decode_jobs, (self.prefill_side, self.decode_side)
        counts: dict[str, float] = {}
        for side in sides:
            for name, value in side.counts.items():
                counts[f"handoff.{name}"] = counts.get(f"handoff.{name}", 0) + value
        return {
            **self.engine.stats(),
            "queued_tokens": self.engine.queued_tokens(),
            "waiting_prompts": len(self._waiting),
            "handoffs": decode.handoffs,
            "kv_pages_moved": decode.pages_received,
            "kv_pages_found": decode.pages_found,
            "kv_bytes_moved": decode.bytes_received,
            "handoff.bytes_offered": self.prefill_jobs.bytes_staged,
            "handoff.recomputed": decode.recomputed,
            "handoff.held": self.prefill_jobs.num_held,
            "handoff.waiting": self.decode_side.num_waiting,
            "handoff.refusals": len(self.links.refusals),
            **counts,
        }

    def trace_events(self) -> list[dict[str, Any]]:
        """The newest spans, in the Chrome trace format."""
        return self.timeline.events()

    def memory(self) -> dict[str, int]:
        return self.engine.memory()

    def drain(self) -> None:
        self.engine.drain()

    def close(self) -> None:
        """Ends links and transport, then the engine."""
        self.links.close()
        self.transport.close()
        self.engine.close()

    def check_integrity(self) -> None:
        """Raises AssertionError if a page, slot or request is lost, or pages are held for nobody."""
        self.engine.check_integrity()
        held = sum(scheduler.cache.num_detached for scheduler in self.engine.schedulers)
        assert held <= self.prefill_side.num_jobs, f"pages are held under {held} keys of no lease"
        assert self.decode_jobs.num_reserved == self.decode_side.num_waiting, "a reservation waits for nothing"


def check_role(role: str) -> None:
    if role not in ROLES:
        raise ConfigError(f"role is {role!r}; it must be one of {', '.join(ROLES)}.")

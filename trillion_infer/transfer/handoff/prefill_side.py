"""The side that prefills: what it computes and holds for whom, until an acknowledgement or a deadline."""

import hashlib
import struct
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Protocol

from trillion_infer.core.errors import InvalidRequestError, QueueFullError
from trillion_infer.transfer.handoff.limits import HandoffLimits
from trillion_infer.transfer.handoff.messages import (
    Abort,
    Ack,
    Ask,
    Beat,
    Message,
    Offer,
    Piece,
    Refused,
    Renew,
    Resend,
)

TOMBSTONES = 4096
"""Ended attempts remembered, so that a late duplicate of their Ask starts nothing. Its lease frees one forgotten."""


class PrefillBackend(Protocol):
    """What computes prompts and holds their pages."""

    def start(self, ask: Ask) -> None:
        """Begins. Raises InvalidRequestError or QueueFullError, without effect."""
        ...

    def drop(self, key: str) -> None:
        """Stops computing for this attempt and gives back every page and copy held for it."""
        ...

    def again(self, key: str, pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
        """The same pieces of a finished prompt once more, read from the pages held for it: new tickets and digests."""
        ...

    def queued_tokens(self) -> int: ...


@dataclass
class _Job:
    """An attempt. `lease`: when it ends unless renewed; `end`: when it ends in any case."""

    peer: str
    ask: Ask
    lease: float
    end: float
    prompt: bytes
    round: int = 0
    done: bool = False
    sent: float = 0.0
    offers: list[Offer] = field(default_factory=list)


class PrefillSide:
    """Attempts by key. Every way out of here passes `_end`, which drops all that is held: no page is held for nobody.

    Every call takes the time, in seconds of any steady clock. What is to be sent gathers in `outbox`.
    """

    def __init__(self, limits: HandoffLimits, backend: PrefillBackend):
        self.limits, self.backend = limits, backend
        self.outbox: list[tuple[str, Message]] = []
        self.accepts = True
        self.counts: Counter[str] = Counter()
        self._jobs: dict[str, _Job] = {}
        self._ended: dict[str, None] = {}
        self._epochs: dict[str, str] = {}
        self._up: set[str] = set()
        self._beat = 0.0

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    def connected(self, peer: str, epoch: str, now: float) -> None:
        """A handshake: attempts of an earlier life of this peer are over."""
        if self._epochs.get(peer) != epoch:
            self._epochs[peer] = epoch
            for key in [key for key, job in self._jobs.items() if job.peer == peer]:
                self._end(key)
        self._up.add(peer)
        self.outbox.append((peer, self._sign()))

    def receive(self, peer: str, epoch: str, message: Message, now: float) -> None:
        """A message; those of another life of the peer are ignored."""
        if self._epochs.get(peer) != epoch:
            self.counts["stale_messages"] += 1
            return
        match message:
            case Ask():
                self._ask(peer, message, now)
            case Renew():
                for key in message.keys:
                    self._renew(peer, key, now)
            case Resend():
                self._resend(peer, message, now)
            case Ack():
                self.counts["acks"] += message.key in self._jobs
                self._end(message.key)
            case Abort():
                self.counts["aborts"] += message.key in self._jobs
                self._end(message.key)
            case _:
                self.counts["stale_messages"] += 1

    def _ask(self, peer: str, ask: Ask, now: float) -> None:
        if ask.key in self._jobs:
            return
        if ask.key in self._ended:
            self._refuse(peer, ask.key, "gone", "this attempt has ended")
            return
        if not self.accepts:
            self._refuse(peer, ask.key, "busy", "the worker is being drained")
            return
        if self.backend.queued_tokens() > self.limits.max_queued_tokens:
            self._refuse(peer, ask.key, "busy", f"more than {self.limits.max_queued_tokens} tokens are queued")
            return
        try:
            self.backend.start(ask)
        except InvalidRequestError as error:
            self._refuse(peer, ask.key, "bad", str(error))
        except QueueFullError as error:
            self._refuse(peer, ask.key, "busy", str(error))
        else:
            self.counts["leases"] += 1
            end = now + ask.budget_s
            self._jobs[ask.key] = _Job(peer, ask, now + self.limits.lease_s, end, prompt_digest(ask))

    def _renew(self, peer: str, key: str, now: float) -> None:
        job = self._jobs.get(key)
        if job is None:
            self._refuse(peer, key, "gone", "nothing is held under this key")
            return
        job.lease = now + self.limits.lease_s
        if job.done and now - job.sent >= 2 * self.limits.beat_s:
            self._send_offers(job, now)

    def _resend(self, peer: str, message: Resend, now: float) -> None:
        job = self._jobs.get(message.key)
        if job is None or not job.done:
            self._refuse(peer, message.key, "gone", "nothing is leased under this key")
            return
        job.lease = now + self.limits.lease_s
        if job.round < message.round:
            self.counts["resends"] += 1
            before = job.offers
            job.round, job.offers = message.round, []
            for offer in before:
                pieces = self.backend.again(message.key, offer.pieces)
                if [piece.digest for piece in pieces] != [piece.digest for piece in offer.pieces]:
                    self.counts["digest_failures"] += 1
                    self.failed(message.key, "gone", "the leased pages no longer hold what was offered")
                    return
                job.offers.append(replace(offer, round=job.round, pieces=pieces))
        self._send_offers(job, now)

    def offer(self, key: str, pieces: tuple[Piece, ...], last: bool, cached: int, now: float) -> None:
        """The backend has computed and exposed the next part of an attempt; its pages are held from now on."""
        job = self._jobs.get(key)
        if job is None:
            self.backend.drop(key)
            return
        job.offers.append(Offer(key, job.round, len(job.offers), last, job.prompt, cached, pieces))
        job.done, job.sent = last, now
        self.outbox.append((job.peer, job.offers[-1]))

    def failed(self, key: str, kind: str, reason: str) -> None:
        """The backend cannot go on with an attempt."""
        job = self._jobs.get(key)
        self._end(key)
        if job is not None:
            self._refuse(job.peer, key, kind, reason)

    def tick(self, now: float) -> None:
        """Frees every lease that has run out, wherever it stands, and gives signs of life."""
        for key in self.overdue(now):
            self.counts["expired"] += 1
            self.failed(key, "gone", "the lease has run out")
        if now - self._beat >= self.limits.beat_s:
            self._beat = now
            self.outbox += [(peer, self._sign()) for peer in self._up]

    def overdue(self, now: float) -> list[str]:
        """Attempts held past their lease: none right after `tick`."""
        return [key for key, job in self._jobs.items() if now >= min(job.lease, job.end)]

    def disconnected(self, peer: str, now: float) -> None:
        """The link to a peer is down: no signs of life until it is back. Leases run on."""
        self._up.discard(peer)

    def _sign(self) -> Beat:
        return Beat(self.backend.queued_tokens(), self.accepts)

    def _send_offers(self, job: _Job, now: float) -> None:
        job.sent = now
        self.outbox += [(job.peer, offer) for offer in job.offers]

    def _refuse(self, peer: str, key: str, kind: str, reason: str) -> None:
        self.outbox.append((peer, Refused(key, kind, reason)))

    def _end(self, key: str) -> None:
        self._ended[key] = None
        if len(self._ended) > TOMBSTONES:
            del self._ended[next(iter(self._ended))]
        if self._jobs.pop(key, None) is not None:
            self.backend.drop(key)


def prompt_digest(ask: Ask) -> bytes:
    """Names the prompt and all else that its KV depends on, the model aside."""
    sha = hashlib.sha256(f"{len(ask.salt)}/{ask.salt}/{ask.adapter}/".encode())
    sha.update(struct.pack(f"<{len(ask.prompt_ids)}I", *ask.prompt_ids))
    return sha.digest()[:16]

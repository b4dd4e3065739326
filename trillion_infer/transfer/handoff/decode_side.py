"""The side that decodes: what it has asked of whom, and what becomes of it by the deadline at the latest."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from trillion_infer.transfer.handoff.limits import HandoffLimits
from trillion_infer.transfer.handoff.messages import Abort, Ack, Ask, Beat, Message, Offer, Refused, Renew, Resend
from trillion_infer.transfer.handoff.prefill_side import prompt_digest

RESENDS = 1
"""Failed transfers that are tried again from the same lease."""


class DecodeBackend(Protocol):
    """What holds the pages that were reserved for a request, and fills them."""

    def fetch(self, request_id: str, peer: str, offer: Offer) -> None:
        """Starts fetching and verifying an offer; DecodeSide.fetched tells the outcome, once."""
        ...

    def ready(self, request_id: str, cached: int) -> None:
        """Every page has arrived and was verified: the request decodes from now on."""
        ...

    def give_up(self, request_id: str, kind: str, reason: str) -> None:
        """No worker hands it over. kind: `bad` (the request itself is refused) or `failed` (apply the policy)."""
        ...


@dataclass
class _Attempt:
    """One prefill worker asked for one request. `heard`: its last word about anything. parts: outcome by number,
    None while being fetched."""

    peer: str
    ask: Ask
    heard: float
    round: int = 0
    parts: dict[int, bool] = field(default_factory=dict)
    total: int | None = None
    cached: int = 0

    @property
    def is_complete(self) -> bool:
        return self.total is not None and all(self.parts.get(part) for part in range(self.total))


@dataclass
class _Question:
    """A request that waits for its KV. `ask` without a key; `attempt`: None while no worker could be asked, since
    `idle`."""

    ask: Ask
    peers: tuple[str, ...]
    deadline: float
    attempts: int = 0
    tried: list[str] = field(default_factory=list)
    attempt: _Attempt | None = None
    not_before: float = 0.0
    idle: float = 0.0
    reason: str = "no prefill worker is connected"


class DecodeSide:
    """Requests by id. Each ends in exactly one of `ready`, `give_up` and `abort`.

    epoch: names this life of the worker; keys begin with it. Every call takes the time. What is to be sent gathers in
    `outbox`.
    """

    def __init__(self, epoch: str, limits: HandoffLimits, backend: DecodeBackend):
        self.limits, self.backend = limits, backend
        self.outbox: list[tuple[str, Message]] = []
        self.counts: Counter[str] = Counter()
        self._epoch, self._numbers = epoch, itertools.count()
        self._questions: dict[str, _Question] = {}
        self._by_key: dict[str, str] = {}
        self._epochs: dict[str, str] = {}
        self._up: set[str] = set()
        self._loads: dict[str, Beat] = {}
        self._beat = 0.0

    @property
    def num_waiting(self) -> int:
        return len(self._questions)

    @property
    def peers(self) -> list[str]:
        """Prefill workers that are connected and take prompts."""
        return [peer for peer in self._up if peer not in self._loads or self._loads[peer].accepts]

    # Requests

    def ask(self, request_id: str, ask: Ask, peers: Sequence[str], now: float) -> None:
        """Wants the KV of a request, from one of `peers` in this order, or from the one with the shortest queue.

        `ask.key` is filled in here. Pages for all of it are reserved.
        """
        question = _Question(ask, tuple(peers), now + ask.budget_s, idle=now)
        self._questions[request_id] = question
        self._next(request_id, question, now)

    def abort(self, request_id: str) -> None:
        """Nobody waits for this request any more. Unknown ids change nothing."""
        question = self._questions.pop(request_id, None)
        if question is not None:
            self._leave(question)

    # Peers

    def connected(self, peer: str, epoch: str, now: float) -> None:
        """A handshake. What an earlier life of this peer was asked is asked again."""
        self._up.add(peer)
        if self._epochs.get(peer) != epoch:
            self._epochs[peer] = epoch
            self._loads.pop(peer, None)
            self._lost(peer, "the worker restarted", now)
        for request_id, question in list(self._questions.items()):
            if question.attempt is None:
                self._next(request_id, question, now)

    def disconnected(self, peer: str, now: float) -> None:
        self._up.discard(peer)
        self._lost(peer, "the link to the worker broke", now)

    def _lost(self, peer: str, reason: str, now: float) -> None:
        for request_id, question in list(self._questions.items()):
            if question.attempt is not None and question.attempt.peer == peer:
                self._retry(request_id, question, reason, now)

    def receive(self, peer: str, epoch: str, message: Message, now: float) -> None:
        """A message; those of another life of the peer are ignored."""
        if self._epochs.get(peer) != epoch:
            self.counts["stale_messages"] += 1
            return
        self._up.add(peer)
        for question in self._questions.values():
            if question.attempt is not None and question.attempt.peer == peer:
                question.attempt.heard = now
        match message:
            case Offer():
                self._offered(peer, message, now)
            case Refused():
                self._refused(message, now)
            case Beat():
                self._loads[peer] = message
            case _:
                self.counts["stale_messages"] += 1

    # Offers

    def wants(self, key: str, round: int) -> bool:
        """Whether pages fetched for this round of an attempt may still be put in place."""
        current = self._current(key)
        return current is not None and current[2].round == round

    def _current(self, key: str) -> tuple[str, _Question, _Attempt] | None:
        request_id = self._by_key.get(key)
        question = self._questions.get(request_id or "")
        if request_id is None or question is None or question.attempt is None or question.attempt.ask.key != key:
            return None
        return request_id, question, question.attempt

    def _offered(self, peer: str, offer: Offer, now: float) -> None:
        current = self._current(offer.key)
        if current is None:
            self.counts["stale_offers"] += 1
            self.outbox.append((peer, Abort(offer.key)))
            return
        request_id, question, attempt = current
        if offer.round != attempt.round or offer.part in attempt.parts:
            return
        if offer.prompt != prompt_digest(attempt.ask):
            self.counts["digest_failures"] += 1
            self._retry(request_id, question, "the offer is of another prompt", now)
            return
        attempt.parts[offer.part] = False
        if offer.last:
            attempt.total, attempt.cached = offer.part + 1, offer.cached
        self.backend.fetch(request_id, peer, offer)

    def fetched(self, key: str, round: int, part: int, error: str | None, now: float) -> None:
        """An offer's pages are in place (`error` None), or are not. Late news of an earlier attempt change nothing."""
        current = self._current(key)
        if current is None or current[2].round != round:
            return
        request_id, question, attempt = current
        if error is None:
            attempt.parts[part] = True
            if attempt.is_complete:
                self.outbox.append((attempt.peer, Ack(key)))
                self._forget(request_id, question)
                self.backend.ready(request_id, attempt.cached)
            return
        self.counts["transfer_failures"] += 1
        if attempt.total is None or attempt.round >= RESENDS:
            self._retry(request_id, question, error, now)
            return
        attempt.round, attempt.parts, attempt.total = attempt.round + 1, {}, None
        self.outbox.append((attempt.peer, Resend(key, attempt.round)))

    def _refused(self, message: Refused, now: float) -> None:
        current = self._current(message.key)
        if current is None:
            return
        request_id, question, _ = current
        if message.kind == "bad":
            self._leave(question)
            self._give_up(request_id, question, "bad", message.reason)
            return
        if message.kind == "busy":
            self.counts["busy"] += 1
            question.attempts -= 1
        self._retry(request_id, question, message.reason, now)

    # Attempts

    def _next(self, request_id: str, question: _Question, now: float) -> None:
        """Asks the next worker; without one, the question waits for a connection, a beat or its deadline."""
        peer = self._choose(question, now)
        if peer is None:
            return
        key = f"{self._epoch}.{next(self._numbers)}"
        ask = replace(question.ask, key=key, budget_s=max(0.001, question.deadline - now))
        question.attempts += 1
        question.tried.append(peer)
        question.attempt = _Attempt(peer, ask, now)
        self._by_key[key] = request_id
        self.counts["asks"] += 1
        self.outbox.append((peer, ask))

    def _choose(self, question: _Question, now: float) -> str | None:
        """The one tried least, then by the order given, then by load; none before `not_before`."""
        able = self.peers
        if not able or now < question.not_before:
            return None
        order = {peer: place for place, peer in enumerate(question.peers)}
        return min(able, key=lambda p: (question.tried.count(p), order.get(p, len(order)), self._load(p), p))

    def _load(self, peer: str) -> int:
        """Prompt tokens in a peer's queue as it last told, and those that were asked of it since."""
        told = self._loads[peer].queued_tokens if peer in self._loads else 0
        asked = (q.attempt.ask for q in self._questions.values() if q.attempt is not None and q.attempt.peer == peer)
        return max(told, sum(len(ask.prompt_ids) for ask in asked))

    def _retry(self, request_id: str, question: _Question, reason: str, now: float) -> None:
        self._leave(question)
        question.reason, question.idle = reason, now
        if question.attempts >= self.limits.max_attempts:
            self._give_up(request_id, question, "failed", reason)
            return
        self.counts["retries"] += 1
        if question.tried and set(self.peers) <= set(question.tried[-len(self.peers) :]):
            question.not_before = now + self.limits.beat_s
        self._next(request_id, question, now)

    def _leave(self, question: _Question) -> None:
        """Tells the worker of the present attempt that nobody waits for it."""
        if question.attempt is not None:
            self.counts["aborts"] += 1
            self.outbox.append((question.attempt.peer, Abort(question.attempt.ask.key)))
            del self._by_key[question.attempt.ask.key]
            question.attempt = None

    def _forget(self, request_id: str, question: _Question) -> None:
        if question.attempt is not None:
            del self._by_key[question.attempt.ask.key]
        del self._questions[request_id]

    def _give_up(self, request_id: str, question: _Question, kind: str, reason: str) -> None:
        self.counts["given_up"] += 1
        self._forget(request_id, question)
        self.backend.give_up(request_id, kind, reason)

    def tick(self, now: float) -> None:
        """Applies deadlines, asks others where a worker is silent, and renews leases."""
        for request_id, question in list(self._questions.items()):
            if now >= question.deadline:
                self._leave(question)
                self._give_up(request_id, question, "failed", f"the deadline has passed; last: {question.reason}")
            elif question.attempt is None:
                if self.peers:
                    self._next(request_id, question, now)
                elif now - question.idle >= self.limits.silence_s:
                    self._give_up(request_id, question, "failed", question.reason)
            elif now - question.attempt.heard >= self.limits.silence_s:
                self._up.discard(question.attempt.peer)
                self._retry(request_id, question, "the worker is silent", now)
        if now - self._beat >= self.limits.beat_s:
            self._beat = now
            for peer in self._up:
                keys = [q.attempt.ask.key for q in self._questions.values() if q.attempt and q.attempt.peer == peer]
                if keys:
                    self.outbox.append((peer, Renew(tuple(keys))))

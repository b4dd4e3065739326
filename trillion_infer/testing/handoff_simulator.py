"""A world in which the hand-off protocol runs under loss, delay, duplication, reordering, crash and restart.

Deterministic: a seed is a schedule. The two sides are the real ones; pages, network, workers and clients are simulated,
and pages are read from their pool only when they are fetched, so that whoever frees them too early is found out.
"""

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trillion_infer.transfer.handoff.decode_side import DecodeSide
from trillion_infer.transfer.handoff.limits import HandoffLimits
from trillion_infer.transfer.handoff.messages import Ask, Message, Offer, Piece
from trillion_infer.transfer.handoff.prefill_side import PrefillSide

LIMITS = HandoffLimits(lease_s=4.0, beat_s=1.0, silence_s=3.0, deadline_s=20.0, max_attempts=4)
END_S = 200.0
"""By then every request must have ended, whatever happened."""


def content(prompt: tuple[int, ...], block: int) -> int:
    """What a page holds: depends on the prompt up to and including this block of one token."""
    value = 17
    for token in prompt[: block + 1]:
        value = (value * 1_000_003 + token + 1) & 0xFFFFFFFFFFFF
    return value


def digest(pages: list[int]) -> bytes:
    value = 5
    for page in pages:
        value = (value * 6_364_136_223_846_793_005 + page) & 0xFFFFFFFFFFFFFFFF
    return value.to_bytes(8, "little")


@dataclass
class Faults:
    """What the network and the workers of a schedule do wrong."""

    loss: float = 0.0
    duplication: float = 0.0
    delay: float = 0.01
    transport_error: float = 0.0
    corruption: float = 0.0
    crashes: int = 0
    blips: int = 0

    @property
    def is_calm(self) -> bool:
        return not (self.loss or self.transport_error or self.corruption or self.crashes or self.blips)


@dataclass
class Client:
    """A request as its client sees it. `outcome`: done, failed or aborted."""

    name: str
    prompt: tuple[int, ...]
    length: int
    policy: str
    tokens: list[int] = field(default_factory=list)
    outcome: str | None = None

    @property
    def expected(self) -> list[int]:
        last = content(self.prompt, len(self.prompt) - 1)
        return [(last * 31 + i) % 1009 for i in range(self.length)]


class PrefillWorker:
    """Pages, a queue of prompts, and the tickets under which pages can be fetched."""

    def __init__(self, world: "World", name: str, pages: int):
        self.world, self.name, self.epoch = world, name, world.new_epoch()
        self.memory = [0] * pages
        self.free = list(range(pages))
        self.held: dict[str, list[int]] = {}
        self.tickets: dict[int, tuple[str, list[int]]] = {}
        self.queue: list[Ask] = []
        self.asks: dict[str, Ask] = {}
        self.side = world.prefill_side(LIMITS, self)

    def start(self, ask: Ask) -> None:
        self.asks[ask.key] = ask
        self.queue.append(ask)
        self._run()

    def _run(self) -> None:
        while self.queue and len(self.queue[0].prompt_ids) <= len(self.free):
            ask = self.queue.pop(0)
            self.held[ask.key] = [self.free.pop(0) for _ in ask.prompt_ids]
            half = len(ask.prompt_ids) // 2
            self.world.after(0.1, self, lambda a=ask, h=half: self._computed(a, 0, h, False))
            self.world.after(0.3, self, lambda a=ask, h=half: self._computed(a, h, len(a.prompt_ids), True))

    def _computed(self, ask: Ask, start: int, end: int, last: bool) -> None:
        if ask.key not in self.held:
            return
        for block in range(start, end):
            self.memory[self.held[ask.key][block]] = content(ask.prompt_ids, block)
        pieces = self._expose(ask, max(start, ask.have), end)
        if pieces or last:
            self.side.offer(ask.key, pieces, last, 0, self.world.now)

    def _expose(self, ask: Ask, start: int, end: int) -> tuple[Piece, ...]:
        if start >= end:
            return ()
        pages = self.held[ask.key][start:end]
        ticket = next(self.world.numbers)
        self.tickets[ticket] = (ask.key, pages)
        return (Piece(0, start, end - start, digest([self.memory[p] for p in pages]), ticket, 8 * len(pages)),)

    def again(self, key: str, pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
        exposed = (self._expose(self.asks[key], piece.first, piece.first + piece.count) for piece in pieces)
        return tuple(piece for part in exposed for piece in part)

    def drop(self, key: str) -> None:
        self.asks.pop(key, None)
        self.queue = [ask for ask in self.queue if ask.key != key]
        pages = self.held.pop(key, [])
        for page in pages:
            self.memory[page] = -1
        self.free += pages
        self.tickets = {t: entry for t, entry in self.tickets.items() if entry[0] != key}
        self._run()

    def queued_tokens(self) -> int:
        return sum(len(ask.prompt_ids) for ask in self.queue)

    def is_idle(self) -> bool:
        return len(self.free) == len(self.memory) and not self.side.num_jobs and not self.tickets


class DecodeWorker:
    """Reserved pages of each request, and requests that wait for room or emit tokens."""

    def __init__(self, world: "World", name: str, pages: int):
        self.world, self.name, self.epoch = world, name, world.new_epoch()
        self.free, self.size = pages, pages
        self.waiting: list[Client] = []
        self.pages: dict[str, list[int | None]] = {}
        self.clients: dict[str, Client] = {}
        self.running: set[str] = set()
        self.side = world.decode_side(self.epoch, LIMITS, self)

    def submit(self, client: Client) -> None:
        self.waiting.append(client)
        self.admit()

    def admit(self) -> None:
        """Reserves all pages a request needs, or none."""
        while self.waiting and len(self.waiting[0].prompt) <= self.free:
            client = self.waiting.pop(0)
            self.free -= len(client.prompt)
            have = self.world.random.randrange(len(client.prompt)) if self.world.random.random() < 0.3 else 0
            known = [content(client.prompt, block) if block < have else None for block in range(len(client.prompt))]
            self.pages[client.name], self.clients[client.name] = known, client
            ask = Ask("", client.prompt, 0, have, "", "", 0, LIMITS.deadline_s)
            self.side.ask(client.name, ask, (), self.world.now)

    def fetch(self, request_id: str, peer: str, offer: Offer) -> None:
        self.world.after(self.world.delay() + 0.05, self, lambda: self._read(request_id, peer, offer))

    def _read(self, request_id: str, peer: str, offer: Offer) -> None:
        error = None
        for piece in offer.pieces:
            error = error or self._read_piece(request_id, self.world.workers.get(peer), offer, piece)
        self.side.fetched(offer.key, offer.round, offer.part, error, self.world.now)

    def _read_piece(self, request_id: str, source: Any, offer: Offer, piece: Piece) -> str | None:
        faults, chance = self.world.faults, self.world.random.random
        found = source.tickets.get(piece.ticket) if source is not None else None
        if source is None or found is None or chance() < faults.transport_error:
            return "the transport failed"
        data = [source.memory[page] for page in found[1]]
        if chance() < faults.corruption:
            data[0] ^= 1
        if not self.verified(data, piece):
            return "the digest does not match"
        if self.side.wants(offer.key, offer.round):
            self.pages[request_id][piece.first : piece.first + piece.count] = data
        return None

    def verified(self, data: list[int], piece: Piece) -> bool:
        return digest(data) == piece.digest

    def ready(self, request_id: str, cached: int) -> None:
        client = self.clients[request_id]
        self.running.add(request_id)
        self._emit(client, self.pages[request_id][-1] or 0, 0)

    def _emit(self, client: Client, last: int, index: int) -> None:
        """Generates from the first token on; what the client has is generated again and not sent."""
        if client.name not in self.running:
            return
        if index == client.length:
            self.release(client.name)
            self.world.end(client, "done")
            return
        if self.sends(client, index):
            self.world.token(client, (last * 31 + index) % 1009)
        self.world.after(0.1, self, lambda: self._emit(client, last, index + 1))

    def sends(self, client: Client, index: int) -> bool:
        return index >= len(client.tokens)

    def give_up(self, request_id: str, kind: str, reason: str) -> None:
        client = self.clients[request_id]
        if client.policy == "recompute":
            self.running.add(request_id)
            self.world.after(0.5, self, lambda: self._emit(client, content(client.prompt, len(client.prompt) - 1), 0))
            return
        self.release(request_id)
        self.world.end(client, "failed")

    def abort(self, client: Client) -> None:
        self.waiting = [each for each in self.waiting if each is not client]
        self.side.abort(client.name)
        self.release(client.name)

    def release(self, request_id: str) -> None:
        self.running.discard(request_id)
        self.clients.pop(request_id, None)
        self.free += len(self.pages.pop(request_id, []))
        self.world.after(0.0, self, self.admit)

    def is_idle(self) -> bool:
        return self.free == self.size and not self.side.num_waiting and not self.waiting


class World:
    """One schedule. `problems` says what went wrong; empty is what it should be."""

    def __init__(
        self,
        seed: int,
        faults: Faults | None = None,
        prefill_side: type[PrefillSide] = PrefillSide,
        decode_side: type[DecodeSide] = DecodeSide,
        prefill_worker: type[PrefillWorker] = PrefillWorker,
        decode_worker: type[DecodeWorker] = DecodeWorker,
    ):
        self.random = random.Random(seed)
        self.faults = faults if faults is not None else draw_faults(self.random)
        self.prefill_side, self.decode_side = prefill_side, decode_side
        self.kinds = {"p": prefill_worker, "d": decode_worker}
        self.now, self.numbers, self.problems = 0.0, itertools.count(1), []
        self._events: list[tuple[float, int, Any, Callable[[], None]]] = []
        self._epochs = itertools.count(1)
        self.homes: dict[str, str] = {}
        self.workers: dict[str, Any] = {}
        for name in ("p0", "p1", "d0", "d1"):
            self.start(name)
        self.clients = [self._client(number) for number in range(self.random.randint(2, 5))]
        for _ in range(self.faults.crashes):
            self.at(self.random.uniform(0.1, 3.0), lambda: self.crash(self.random.choice(list(self.workers))))
        for _ in range(self.faults.blips):
            self.at(self.random.uniform(0.1, 3.0), self.blip)

    # Time

    def at(self, when: float, action: Callable[[], None], owner: Any = None) -> None:
        heapq.heappush(self._events, (when, next(self.numbers), owner, action))

    def after(self, seconds: float, owner: Any, action: Callable[[], None]) -> None:
        """An action of a worker's present life."""
        self.at(self.now + seconds, action, owner)

    def delay(self) -> float:
        return self.random.uniform(0.001, self.faults.delay)

    def run(self) -> "World":
        """Runs until every client has its end and every lease has run out; then looks for what is left."""
        quiet = None
        while self._events:
            when, _, owner, action = heapq.heappop(self._events)
            self.now = when
            if when > END_S or (quiet is not None and when > quiet):
                break
            if owner is None or self.workers.get(owner.name) is owner:
                action()
                self._flush()
            if quiet is None and all(client.outcome for client in self.clients):
                quiet = self.now + LIMITS.lease_s + 3 * LIMITS.beat_s
        self._check()
        return self

    # Workers

    def new_epoch(self) -> str:
        return f"e{next(self._epochs)}"

    def start(self, name: str) -> None:
        worker = self.kinds[name[0]](self, name, self.random.randint(5, 9))
        self.workers[name] = worker
        self.after(0.0, worker, lambda: self._tick(worker))
        for other in list(self.workers.values()):
            if other.name[0] != name[0]:
                self._connect(worker, other)

    def _connect(self, one: Any, two: Any) -> None:
        def meet() -> None:
            if self.workers.get(one.name) is one and self.workers.get(two.name) is two:
                one.side.connected(two.name, two.epoch, self.now)
                two.side.connected(one.name, one.epoch, self.now)

        self.at(self.now + self.delay(), meet)

    def _tick(self, worker: Any) -> None:
        worker.side.tick(self.now)
        if isinstance(worker, PrefillWorker) and worker.side.overdue(self.now):
            self.problems.append(f"{worker.name} holds pages past their lease")
        self.after(LIMITS.beat_s / 2, worker, lambda: self._tick(worker))

    def crash(self, name: str) -> None:
        """A worker loses everything; its peers' links break, its clients go elsewhere, and it comes back as another."""
        worker = self.workers.pop(name, None)
        if worker is None:
            return
        for other in list(self.workers.values()):
            if other.name[0] != name[0]:
                self.after(self.delay(), other, lambda o=other: o.side.disconnected(name, self.now))
        for client in self.clients:
            if self.homes.get(client.name) == name and client.outcome is None:
                del self.homes[client.name]
                self.at(self.now + 0.05, lambda c=client: self.place(c))
        self.at(self.now + self.random.uniform(0.2, 5.0), lambda: self.start(name))

    def blip(self) -> None:
        """A link breaks and comes back."""
        ups = (
            [w for w in self.workers.values() if w.name[0] == "p"],
            [w for w in self.workers.values() if w.name[0] == "d"],
        )
        if all(ups):
            one, two = (self.random.choice(group) for group in ups)
            one.side.disconnected(two.name, self.now)
            two.side.disconnected(one.name, self.now)
            self.at(self.now + 0.3, lambda: self._connect(one, two))

    def _flush(self) -> None:
        for worker in list(self.workers.values()):
            sent, worker.side.outbox[:] = list(worker.side.outbox), []
            for peer, message in sent:
                self._send(worker, peer, message)

    def _send(self, sender: Any, peer: str, message: Message) -> None:
        chance = self.random.random
        copies = 0 if chance() < self.faults.loss else 2 if chance() < self.faults.duplication else 1
        for _ in range(copies):
            self.at(self.now + self.delay(), lambda: self._arrive(sender, peer, message))

    def _arrive(self, sender: Any, peer: str, message: Message) -> None:
        if peer in self.workers:
            self.workers[peer].side.receive(sender.name, sender.epoch, message, self.now)

    # Clients

    def _client(self, number: int) -> Client:
        rand = self.random
        prompt = tuple(rand.randrange(3) for _ in range(rand.randint(1, 5)))
        client = Client(f"r{number}", prompt, rand.randint(1, 4), rand.choice(["recompute", "fail"]))
        self.at(rand.uniform(0.0, 2.0), lambda: self.place(client))
        if rand.random() < 0.2:
            self.at(rand.uniform(0.0, 3.0), lambda: self._leave(client))
        return client

    def place(self, client: Client) -> None:
        """The router: sends a request to a decode worker that lives, again if the one before has died."""
        if client.outcome is not None:
            return
        able = [name for name in self.workers if name[0] == "d"]
        if not able:
            self.at(self.now + 0.5, lambda: self.place(client))
            return
        self.homes[client.name] = self.random.choice(able)
        self.workers[self.homes[client.name]].submit(client)

    def _leave(self, client: Client) -> None:
        if client.outcome is None:
            self.end(client, "aborted")
            home = self.workers.get(self.homes.get(client.name, ""))
            if home is not None:
                home.abort(client)

    def token(self, client: Client, token: int) -> None:
        client.tokens.append(token)
        if client.tokens != client.expected[: len(client.tokens)]:
            self.problems.append(f"{client.name} got {client.tokens}, not {client.expected}: stale or doubled")

    def end(self, client: Client, outcome: str) -> None:
        if client.outcome not in (None, "aborted"):
            self.problems.append(f"{client.name} ended twice: {client.outcome}, {outcome}")
        client.outcome = client.outcome or outcome
        if outcome == "failed" and self.faults.is_calm:
            self.problems.append(f"{client.name} failed although nothing went wrong")

    def _check(self) -> None:
        for client in self.clients:
            if client.outcome is None:
                self.problems.append(f"{client.name} has no end")
            elif client.outcome == "done" and client.tokens != client.expected:
                self.problems.append(f"{client.name} has {client.tokens}, not {client.expected}: lost tokens")
        for worker in self.workers.values():
            if not worker.is_idle():
                self.problems.append(f"{worker.name} holds pages for nobody")


def draw_faults(rand: random.Random) -> Faults:
    """Faults of a schedule: none in one of eight."""
    if rand.random() < 0.125:
        return Faults(duplication=rand.choice([0.0, 0.3]), delay=rand.choice([0.01, 0.5]))
    return Faults(
        loss=rand.choice([0.0, 0.05, 0.3]),
        duplication=rand.choice([0.0, 0.1, 0.5]),
        delay=rand.choice([0.01, 0.2, 2.0]),
        transport_error=rand.choice([0.0, 0.1, 0.5]),
        corruption=rand.choice([0.0, 0.1]),
        crashes=rand.choice([0, 0, 1, 3]),
        blips=rand.choice([0, 0, 2]),
    )

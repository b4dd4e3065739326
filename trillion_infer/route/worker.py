"""One worker as the router knows it, and the lease that a request holds on it."""

import math
from collections.abc import Callable
from typing import Any

from trillion_infer.route.breaker import Breaker
from trillion_infer.route.config import RouterConfig
from trillion_infer.route.prefix import PrefixIndex

_RECENT_S = 30.0


class Worker:
    """Load and state of a worker. Loads are estimates of the requests that this router has on it, in tokens.

    `up` is what health polling last said; `draining` is an operator's wish: no new requests. `role`, `handoff` (its
    address), `queued_tokens` and `kv_in_use` (0 to 1) are what a worker of a pool last told of itself.
    """

    def __init__(self, url: str, config: RouterConfig, clock: Callable[[], float], role: str | None = None):
        self.url = url
        self.role = role
        self.handoff: str | None = None
        self.queued_tokens, self.kv_in_use = 0, 0.0
        self.up = True
        self.draining = False
        self.requests = 0
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.prefix = PrefixIndex(config.prefix_blocks)
        self._blocks: tuple[str, int] | None = None
        self.breaker = Breaker(config.breaker_failures, config.breaker_cooldown_s, clock)
        self._config, self._clock = config, clock
        self._recent, self._recent_at = 0.0, clock()

    @property
    def load(self) -> int:
        """Tokens in flight."""
        return self.prefill_tokens + self.decode_tokens

    @property
    def reachable(self) -> bool:
        """Whether a request may be sent now, room aside."""
        return self.up and not self.draining and self.breaker.allows()

    def has_room(self, tokens: int) -> bool:
        """Whether `tokens` more fit. A request larger than the limit still runs, alone."""
        if self.requests >= self._config.max_requests_per_worker:
            return False
        return self.requests == 0 or self.load + tokens <= self._config.max_tokens_per_worker

    @property
    def decodes(self) -> bool:
        """Whether it takes clients' requests."""
        return self.role != "prefill"

    @property
    def feeds(self) -> bool:
        """Whether it prefills for others, and where is known."""
        return self.role in ("prefill", "both") and self.handoff is not None

    def told(self, state: dict[str, Any]) -> None:
        """What its /health says; a worker whose role is changing has the one to come."""
        role = state.get("next_role", state.get("role"))
        if isinstance(role, str):
            self.role = role
        self.handoff = state.get("handoff") if isinstance(state.get("handoff"), str) else self.handoff
        queued, used = state.get("queued_tokens"), state.get("kv_in_use")
        if self._blocks is None and state.get("blocks") is True:
            self._blocks = "", 0
        self.queued_tokens = queued if isinstance(queued, int) else self.queued_tokens
        self.kv_in_use = float(used) if isinstance(used, int | float) else self.kv_in_use

    @property
    def blocks_seen(self) -> tuple[str, int] | None:
        """Epoch and number of the last block event, to ask for those after it; None if it tells of none."""
        return self._blocks

    def told_blocks(self, events: dict[str, Any]) -> None:
        """Which prefixes it has stored and removed. What it does not follow stays as this router remembers it."""
        stored, removed = ([bytes.fromhex(each) for each in events[name]] for name in ("stored", "removed"))
        if events["reset"] and self._blocks not in (None, ("", 0)):
            self.prefix.clear()
        self.prefix.add(stored)
        self.prefix.remove(removed)
        self._blocks = str(events["epoch"]), int(events["count"])

    def recent_work(self) -> float:
        """Tokens of work sent here lately; fades by half every 30 seconds."""
        now = self._clock()
        self._recent *= math.exp2((self._recent_at - now) / _RECENT_S)
        self._recent_at = now
        return self._recent

    def lost(self) -> None:
        """The worker is gone or restarting, and with it what it had cached."""
        self.prefix.clear()
        self._blocks = None

    def lease(self, prefill_tokens: int, decode_tokens: int) -> "Lease":
        """Starts a request of that much work."""
        self._recent = self.recent_work() + prefill_tokens + decode_tokens
        self.breaker.start()
        return Lease(self, prefill_tokens, decode_tokens)


class Lease:
    """A request's share of a worker's load. Only the first of `succeed`, `fail` and `abandon` counts.

    feeder: the lease on the worker that prefills for it, which ends with the first token.
    """

    feeder: "Lease | None" = None

    def __init__(self, worker: Worker, prefill_tokens: int, decode_tokens: int):
        self.worker = worker
        self._prefill, self._decode = prefill_tokens, decode_tokens
        self._held = True
        worker.requests += 1
        worker.prefill_tokens += prefill_tokens
        worker.decode_tokens += decode_tokens

    def first_token(self) -> None:
        """Prefill is done."""
        if self._held:
            self.worker.prefill_tokens -= self._prefill
            self._prefill = 0
            if self.feeder is not None:
                self.feeder.succeed()

    def token(self) -> None:
        """One more token is decoded; the last one expected stays until the end."""
        if self._held and self._decode > 1:
            self._decode -= 1
            self.worker.decode_tokens -= 1

    def succeed(self) -> None:
        """The worker answered."""
        if self._release():
            self.worker.breaker.succeed()

    def fail(self) -> None:
        """The worker failed this request."""
        if self._release():
            self.worker.breaker.fail()
            if self.worker.breaker.state != "closed":
                self.worker.lost()

    def abandon(self) -> None:
        """The request ended and says nothing about the worker: it was busy, or the client left."""
        if self._release():
            self.worker.breaker.abandon()

    def _release(self) -> bool:
        held, self._held = self._held, False
        if held:
            if self.feeder is not None:
                self.feeder.abandon()
            self.worker.requests -= 1
            self.worker.prefill_tokens -= self._prefill
            self.worker.decode_tokens -= self._decode
        return held

"""Chooses the worker of each request. Plain decisions: no I/O."""

import dataclasses
import math
from collections.abc import Callable, Sequence

from trillion_infer.core.errors import QueueFullError, TrillionInferError
from trillion_infer.core.prompt_prefix import BLOCK_BYTES, prefix_hashes
from trillion_infer.route.affinity import SessionHomes, preference
from trillion_infer.route.config import RouterConfig
from trillion_infer.route.estimate import TokenEstimator
from trillion_infer.route.request import RequestView
from trillion_infer.route.worker import Lease, Worker

FULL = 0.9
"""Share of KV pages in use above which a decode worker is passed over while another has more room."""


class NoWorkerError(TrillionInferError, RuntimeError):
    """No worker is up (HTTP 503)."""


@dataclasses.dataclass
class Call:
    """A request on its way: `tried` fills with the workers that failed it."""

    view: RequestView
    session: str | None
    hashes: list[bytes]
    prompt_tokens: int
    output_tokens: int
    tried: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True)
class Choice:
    """A lease and why it was taken: `session`, `spill` (the session's home had no room), `prefix` or `load`.

    feeders: hand-off addresses of the prefill workers to ask, the best first; none for a worker without a pool.
    """

    lease: Lease
    reason: str
    matched_tokens: int
    feeders: tuple[str, ...] = ()


class Policy:
    """Least work first, where work is tokens in flight plus the tokens of this prompt that are not cached.

    A session goes to its home. A worker whose recent work is above `balance` times the even share gets no request
    for its cached prefix alone, so that a prefix that everybody shares spreads over the workers.
    """

    def __init__(self, config: RouterConfig, clock: Callable[[], float]):
        self.config = config
        self.estimator = TokenEstimator()
        role = "decode" if config.prefill else None
        self.workers = {url: Worker(url, config, clock, role) for url in config.workers}
        self.workers |= {url: Worker(url, config, clock, "prefill") for url in config.prefill}
        self.homes = SessionHomes(config.balance, config.max_sessions, config.session_ttl_s, clock)
        self._turn = 0

    def call(self, view: RequestView, session: str | None, tenant: str) -> Call:
        """Estimates and hashes of a request. Prefixes and sessions are never shared between tenants."""
        return Call(
            view=view,
            session=None if session is None else f"{tenant}\n{session}",
            hashes=prefix_hashes(view.prompt, tenant.encode("utf-8", "surrogatepass")),
            prompt_tokens=self.estimator.prompt(view),
            output_tokens=self.estimator.output(view),
        )

    def choose(self, call: Call) -> Choice:
        """Leases a worker that has not been tried.

        Raises NoWorkerError if none is left, QueueFullError if those that are left have no room.
        """
        workers = [worker for worker in self.workers.values() if worker.decodes]
        reachable = [worker for worker in workers if worker.reachable and worker.url not in call.tried]
        if not reachable:
            raise NoWorkerError("no worker can take this request: all are down, draining or have failed it; try later.")
        tokens = call.prompt_tokens + call.output_tokens
        open_ = [worker for worker in reachable if worker.has_room(tokens)]
        open_ = [worker for worker in open_ if worker.kv_in_use < FULL] or open_
        if not open_:
            raise QueueFullError("every worker has as many requests in flight as it takes; try again later.")
        worker, reason = self._by_session(call, open_) if call.session else self._by_work(call, open_)
        matched = self._cached(call, worker)
        worker.prefix.add(call.hashes)
        lease = worker.lease(max(1, call.prompt_tokens - matched), call.output_tokens)
        feeders = self._feeders() if worker.role == "decode" else []
        if feeders:
            lease.feeder = feeders[0].lease(max(1, call.prompt_tokens - matched), 0)
        return Choice(lease, reason, matched, tuple(feeder.handoff or "" for feeder in feeders))

    def _feeders(self) -> list[Worker]:
        """Workers that can prefill for others, the one with the fewest queued prompt tokens first.

        The queue is what the worker last told, or what this router has sent it since, if that is more.
        """
        able = [worker for worker in self.workers.values() if worker.feeds and worker.reachable]
        return sorted(able, key=lambda worker: max(worker.queued_tokens, worker.prefill_tokens))

    def _by_session(self, call: Call, open_: Sequence[Worker]) -> tuple[Worker, str]:
        session = call.session or ""
        up = [worker.url for worker in self.workers.values() if worker.reachable and worker.decodes]
        home = self.homes.home(session, up)
        by_url = {worker.url: worker for worker in open_}
        limit = self._limit([worker.load for worker in open_])
        order = [home, *(url for url in preference(session, list(by_url)) if url != home)]
        for url in order:
            if url in by_url and by_url[url].load <= limit:
                return by_url[url], "session" if url == home else "spill"
        return min(open_, key=lambda worker: worker.load), "spill"

    def _by_work(self, call: Call, open_: Sequence[Worker]) -> tuple[Worker, str]:
        self._turn += 1
        limit = self._limit([worker.recent_work() for worker in open_])
        open_ = [worker for worker in open_ if worker.recent_work() <= limit] or open_
        turned = [open_[(self._turn + i) % len(open_)] for i in range(len(open_))]
        best = min(turned, key=lambda worker: worker.load + call.prompt_tokens - self._cached(call, worker))
        return best, "prefix" if self._cached(call, best) else "load"

    def _limit(self, loads: Sequence[float]) -> float:
        return self.config.balance * math.fsum(loads) / len(loads) + self.config.spill_tokens

    def _cached(self, call: Call, worker: Worker) -> int:
        matched = worker.prefix.match(call.hashes) * BLOCK_BYTES
        return min(call.prompt_tokens, matched * call.prompt_tokens // max(1, len(call.view.prompt)))

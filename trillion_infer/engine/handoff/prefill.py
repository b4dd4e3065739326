"""The prefilling half of a worker: prompts of others, run as requests of one token, and the pages held for them."""

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from trillion_infer.cache.kv_cache import KVCache
from trillion_infer.core.errors import InvalidRequestError
from trillion_infer.core.outputs import RequestMetrics
from trillion_infer.core.request import Request, Status
from trillion_infer.core.sampling_params import SamplingParams
from trillion_infer.engine.engine import Engine
from trillion_infer.engine.handoff.staging import PageStager, Staged
from trillion_infer.engine.timeline import Timeline
from trillion_infer.sample.host import sequence_sampling
from trillion_infer.schedule.scheduler import Scheduler
from trillion_infer.transfer.handoff.messages import Ask, Piece
from trillion_infer.transfer.handoff.prefill_side import PrefillSide
from trillion_infer.transfer.pages import PAGES_PER_CALL
from trillion_infer.transfer.transports.base import Transport

PREFIX = "handoff/"


@dataclass
class _Batch:
    """At most 16 pages of one pool that wait for their digest. `first`: block of the first page."""

    pool: int
    first: int
    count: int
    staged: Staged


@dataclass
class _Work:
    """A prompt of a peer, on one data shard. `sent`: blocks of groups that see everything whose pages have been
    staged."""

    ask: Ask
    request: Request
    shard: int
    began: float
    sent: int
    parts: deque[tuple[list[_Batch], bool]] = field(default_factory=deque)
    tickets: list[int] = field(default_factory=list)


class PrefillJobs:
    """Implements PrefillBackend. Pages of finished blocks are staged while later chunks of the same prompt compute."""

    def __init__(self, engine: Engine, stager: PageStager, transport: Transport, vocab: int, timeline: Timeline):
        self._engine, self._stager, self._transport = engine, stager, transport
        self._timeline = timeline
        self._work: dict[str, _Work] = {}
        self._tickets = itertools.count(1)
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        self._params = params
        self._sampling = sequence_sampling(
            params, vocab_size=vocab, eos_ids=(), encode=None, entropy=np.random.default_rng(0)
        )[0]
        self._vocab = vocab
        self.bytes_staged = 0
        engine.on_finish = self._keep

    # PrefillBackend

    def start(self, ask: Ask) -> None:
        if any(not 0 <= token < self._vocab for token in (*ask.prompt_ids, ask.next_id)):
            raise InvalidRequestError(f"the prompt has token ids outside [0, {self._vocab}).", param="prompt")
        now = time.monotonic()
        request = Request(
            PREFIX + ask.key,
            list(ask.prompt_ids),
            self._params,
            max_tokens=1,
            priority=ask.priority,
            cache_salt=ask.salt,
            adapter=ask.adapter,
            sampling=self._sampling,
            next_id=ask.next_id,
            metrics=RequestMetrics(arrival_time=now),
        )
        self._engine.add(request)
        self._work[ask.key] = _Work(ask, request, self._engine.shard_of(request.request_id), now, ask.have)

    def drop(self, key: str) -> None:
        work = self._work.pop(key, None)
        if work is None:
            return
        self._engine.abort(work.request.request_id)
        self._cache(work).release_detached(key)
        for ticket in work.tickets:
            self._transport.withdraw(ticket)

    def again(self, key: str, pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
        work = self._work[key]
        held, exposed = self._cache(work).detached(key), []
        for piece in pieces:
            own = held[self._stager.groups[piece.pool]]
            pages = [own.page(block) for block in range(piece.first, piece.first + piece.count)]
            batch = self._stage(work, piece.pool, piece.first, [page for page in pages if page is not None])
            exposed.append(self._expose(work, batch))
        return tuple(exposed)

    def queued_tokens(self) -> int:
        return self._engine.queued_tokens()

    # Progress

    def is_own(self, request: Request) -> bool:
        """A request that computes a peer's prompt."""
        return request.request_id.startswith(PREFIX)

    def _keep(self, request: Request, scheduler: Scheduler) -> None:
        """A prompt is computed: its pages stay, and what is not staged yet is."""
        key = request.request_id.removeprefix(PREFIX)
        work = self._work.get(key) if self.is_own(request) else None
        if work is None:
            return
        cache = scheduler.cache
        cache.detach(request, key)
        batches, detached = [], cache.detached(key)
        for pool, group in enumerate(self._stager.groups):
            held, full = detached[group], cache.groups[group].group.is_full
            start = max(held.first, work.sent if full else work.ask.have)
            batches += self._stage_range(work, pool, start, held.end, held.page)
        work.parts.append((batches, True))
        now = time.monotonic()
        begun = request.metrics.first_scheduled_time or work.began
        self._timeline.add("queue", key, work.began, begun)
        self._timeline.add("prefill", key, begun, now, tokens=len(work.ask.prompt_ids))

    def advance(self, side: PrefillSide, now: float) -> None:
        """Stages blocks that steps sent so far complete, and offers those whose digests are known."""
        for key, work in list(self._work.items()):
            if work.request.status is Status.RUNNING:
                self._stage_finished(work)
            while work.parts and all(batch.staged.is_ready for batch in work.parts[0][0]):
                batches, last = work.parts.popleft()
                pieces = tuple(self._expose(work, batch) for batch in batches)
                side.offer(key, pieces, last, work.request.num_cached_tokens, now)

    def _stage_finished(self, work: _Work) -> None:
        """Whole batches of finished blocks, of groups whose pages stay until the end."""
        cache = self._cache(work)
        done = work.request.num_computed // cache.page_size
        count = (done - work.sent) // PAGES_PER_CALL * PAGES_PER_CALL
        if count <= 0:
            return
        batches, held = [], cache.held(work.request)
        for pool, group in enumerate(self._stager.groups):
            if cache.groups[group].group.is_full:
                batches += self._stage_range(work, pool, work.sent, work.sent + count, held[group].page)
        work.sent += count
        if batches:
            work.parts.append((batches, False))

    def _cache(self, work: _Work) -> KVCache:
        return self._engine.schedulers[work.shard].cache

    def _stage_range(
        self, work: _Work, pool: int, start: int, end: int, page: Callable[[int], int | None]
    ) -> list[_Batch]:
        batches = []
        for first in range(start, end, PAGES_PER_CALL):
            pages = [page(block) for block in range(first, min(end, first + PAGES_PER_CALL))]
            assert None not in pages, "a block to hand over has no page"
            batches.append(self._stage(work, pool, first, [p for p in pages if p is not None]))
        return batches

    def _stage(self, work: _Work, pool: int, first: int, pages: Sequence[int]) -> _Batch:
        start = self._cache(work).first_page(self._stager.groups[pool], work.shard)
        places = [start + page for page in pages]
        return _Batch(pool, first, len(pages), self._stager.stage(self._engine.all_pools[pool], pool, places))

    def _expose(self, work: _Work, batch: _Batch) -> Piece:
        ticket = next(self._tickets)
        self._transport.expose(ticket, [batch.staged.data])
        work.tickets.append(ticket)
        size = batch.staged.data.nbytes
        self.bytes_staged += size
        return Piece(batch.pool, batch.first, batch.count, batch.staged.digest_bytes(), ticket, size)

    @property
    def num_held(self) -> int:
        """Prompts computed or held for peers."""
        return len(self._work)


def without_last(ids: Sequence[int]) -> tuple[int, ...]:
    """The tokens whose KV a prefill worker computes: the last one's step is the decode worker's, with the sampling."""
    return tuple(ids[:-1])

"""Speculation in the step loop: which requests may be drafted for, what their drafts are, and what steps cost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from trillion_infer.config.engine import EngineConfig
from trillion_infer.core.outputs import DraftFigures
from trillion_infer.core.request import Request, Status
from trillion_infer.engine.buckets import Bucket, Buckets
from trillion_infer.engine.draft_length import draft_length
from trillion_infer.engine.drafting import Drafted
from trillion_infer.schedule.plan import Row
from trillion_infer.schedule.scheduler import Scheduler
from trillion_infer.speculate import DraftRequest, Speculator, StepCost, host_drafters, parse_speculate
from trillion_infer.speculate.base import NOTHING, Draft
from trillion_infer.speculate.offered import OfferedDrafter

_AGED_AFTER = 512
"""Steps after which half of what an unused verifying bucket cost beyond a step without drafts is forgotten."""

_MOST = 4.0
"""A step counts as at most so many times the mean: the caller may have paused."""


class BucketCost(StepCost):
    """Measured seconds of a step by its bucket, asked for by its query tokens in the situation set by `at`.

    A verifying bucket that has not run yet is taken to cost what the next smaller one does and half of what more
    positions added there, so that it gets tried where it may pay.
    Of one that has not run for long the figure falls by and by, and the next run replaces it: a figure from another
    time must not rule it out for ever, and what was far from paying must not be tried often.
    """

    def __init__(self, buckets: Buckets, shards: int = 1):
        super().__init__([bucket.tokens for bucket in buckets.all])
        self._all, self._shards = buckets, shards
        self._by_bucket: dict[Bucket, float] = {}
        self._last_run: dict[Bucket, int] = {}
        self._aged: set[Bucket] = set()
        self._steps = 0
        self.at(1, 0)

    def at(self, sequences: int, prefill_tokens: int) -> None:
        """The coming step has so many sequences and, beside their tokens, so many of prompts, on each shard."""
        self._sequences, self._prefill = max(sequences, 1), prefill_tokens

    def most_drafts(self) -> int:
        """Drafts that one row of the coming step may have."""
        verify = self._all.verify
        fitting = verify[-1:] if self._prefill else [b for b in verify if b.sequences >= self._sequences]
        return max((bucket.width for bucket in fitting), default=1) - 1

    def record_step(self, bucket: Bucket, seconds: float) -> None:
        """One step without compilation took so long. The first run of a bucket is a warm-up and does not count, unless
        it shows that drafts cannot pay; the second replaces it."""
        self._steps += 1
        first = bucket not in self._last_run
        if first and self._is_hopeless(bucket, seconds):
            self._by_bucket[bucket] = seconds
            self._aged.add(bucket)
        elif not first:
            known = self._by_bucket.get(bucket, seconds)
            weight = 1.0 if bucket in self._aged else self._weight
            self._by_bucket[bucket] = known + weight * (min(seconds, _MOST * known) - known)
            self._aged.discard(bucket)
        self._last_run[bucket] = self._steps

    def estimate(self, tokens: int) -> float | None:
        """Seconds of a step with so many query tokens of running requests, over all shards; None if unknown,
        infinite where no step holds them."""
        each = -(-tokens // self._shards)
        base = self._all.choose(self._sequences + self._prefill, self._sequences, decode_only=not self._prefill)
        alone = self._by_bucket.get(base)
        if each <= self._sequences or alone is None:
            return alone
        if each + self._prefill > self._all.verify[-1].tokens:
            return math.inf
        bucket = self._all.choose(each + self._prefill, self._sequences, False, width=2)
        if bucket in self._by_bucket and self._steps - self._last_run[bucket] > _AGED_AFTER:
            self._by_bucket[bucket] = alone + max(0.0, self._by_bucket[bucket] - alone) / 2
            self._last_run[bucket] = self._steps
            self._aged.add(bucket)
        smaller = [b for b in self._all.verify if b.sequences == bucket.sequences and b.tokens <= bucket.tokens]
        known = [b for b in smaller if b in self._by_bucket]
        least = max([alone, *(self._by_bucket[b] for b in known)])
        if not known or known[-1] == bucket or known[-1].tokens <= base.tokens:
            return least
        slope = (least - alone) / (known[-1].tokens - base.tokens)
        return least + slope / 2 * (bucket.tokens - known[-1].tokens)

    def full(self, base: int, most: int) -> list[int]:
        """As StepCost has it, of steps that hold the rows of the coming one."""
        fitting = [bucket.tokens for bucket in self._all.verify if bucket.sequences >= self._sequences]
        totals = [(tokens - self._prefill) * self._shards for tokens in fitting]
        return [*(total for total in totals if base < total < most), most]

    def _is_hopeless(self, bucket: Bucket, seconds: float) -> bool:
        """The step took longer than its tokens would without drafts, even if every draft stood."""
        base = self._all.choose(bucket.sequences, bucket.sequences, decode_only=True)
        alone = self._by_bucket.get(base)
        gain = bucket.tokens / bucket.sequences
        return bucket.verifies and alone is not None and seconds > gain * alone


@dataclass
class _Tracked:
    """A request with at least one token of its own. draft: what was last proposed for it."""

    request: Request
    view: DraftRequest
    text: list[int]
    draft: Draft = field(default=NOTHING)

    def read(self) -> DraftRequest:
        """The drafters' view, brought up to the tokens known now."""
        self.text.extend(self.request.output_ids[len(self.text) - len(self.request.prompt_ids) :])
        return self.view


class Speculation:
    """Drafts of an engine's requests. The engine tells it of tokens, of steps and of ends; it fills `draft_ids`."""

    def __init__(self, config: EngineConfig, buckets: Buckets, shards: int = 1, models: Sequence[str] = ()):
        self.cost = BucketCost(buckets, shards)
        self._length = draft_length(config)
        self._offered = {name: OfferedDrafter(name) for name in models}
        drafters = [*host_drafters(parse_speculate(config.speculate)), *self._offered.values()]
        self._speculator = Speculator(drafters, self.cost, self._length)
        self._tracked: dict[str, _Tracked] = {}

    def draft_always(self) -> None:
        """From now on a step counts as the cheaper the more it verifies, so that all drafts there are get verified,
        however few stood: for measuring drafters."""
        self.cost.estimate = lambda tokens: 1.0 / max(1, tokens)

    def track(self, request: Request) -> None:
        """The request has its first token; drafts may follow."""
        if request.request_id not in self._tracked:
            text = request.known_ids()
            grammar = request.grammar
            forced = None if grammar is None else lambda count: grammar.forced_tokens()[:count]
            view = DraftRequest(request.request_id, text, request.cache_salt, forced)
            self._tracked[request.request_id] = _Tracked(request, view, text)

    def release(self, request: Request) -> None:
        """The request has ended."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is not None:
            self._speculator.release(tracked.read())

    def would_draft(self, schedulers: Sequence[Scheduler]) -> bool:
        """From the tokens known now, some request would get drafts: waiting for those in flight pays."""
        return any(draft.tokens for _, draft in self._propose(schedulers))

    def assign(self, schedulers: Sequence[Scheduler]) -> None:
        """Gives requests their drafts for the next step. Every token must be known."""
        for tracked, draft in self._propose(schedulers):
            tracked.draft, tracked.request.draft_ids = draft, draft.tokens

    def lookahead(self, schedulers: Sequence[Scheduler]) -> int:
        """Drafts that models are to make after the coming step: 0 where there are none or they would not pay."""
        if not self._offered:
            return 0
        most = schedulers[0].config.max_running
        running = [min(most, scheduler.num_running + scheduler.num_waiting) for scheduler in schedulers]
        self.cost.at(max(running), 0)
        ids = [request_id for request_id, t in self._tracked.items() if t.request.status is Status.RUNNING]
        pays = [self._speculator.would_pay(n, ids, sum(running), each.expected) for n, each in self._offered.items()]
        return self._length if any(pays) else 0

    def offer(self, drafted: Drafted) -> None:
        """What a model drafted after the tokens known now."""
        tokens, chances = np.asarray(drafted.tokens).tolist(), np.asarray(drafted.chances).tolist()
        for request, ids, each in zip(drafted.requests, tokens, chances, strict=True):
            if request is not None and request.status is Status.RUNNING:
                self._offered[drafted.name].offer(request.request_id, request.num_known, ids, each)

    def record(self, row: Row, num_tokens: int) -> None:
        """The verifier gave `num_tokens` tokens for a row."""
        tracked = self._tracked.get(row.request.request_id)
        if tracked is not None and row.draft_ids:
            draft = tracked.draft.first(len(row.draft_ids))
            self._speculator.record(tracked.view, draft, num_tokens)
            if num_tokens > 0:
                figures = row.request.metrics.drafts.setdefault(draft.drafter, DraftFigures())
                figures.record(len(draft.tokens), num_tokens - 1)

    def stats(self) -> dict[str, float]:
        """By drafter: drafts verified, tokens proposed and accepted, mean tokens that a verification gave, and the
        share of tokens that stood."""
        figures: dict[str, float] = {}
        for name, stats in self._speculator.stats.by_drafter.items():
            figures[f"speculate.{name}.drafts"] = stats.drafts
            figures[f"speculate.{name}.proposed"] = stats.drafted
            figures[f"speculate.{name}.accepted"] = stats.accepted
            figures[f"speculate.{name}.acceptance_length"] = stats.acceptance_length
            figures[f"speculate.{name}.acceptance_rate"] = stats.acceptance_rate
        return figures

    def _propose(self, schedulers: Sequence[Scheduler]) -> list[tuple[_Tracked, Draft]]:
        ready = [t for t in self._tracked.values() if t.request.status is Status.RUNNING]
        if not ready:
            return []
        most = self._set_situation(schedulers, len(ready))
        if not most:
            return []
        limits = [min(most, max(0, t.request.max_tokens - t.request.num_output - 1)) for t in ready]
        drafts = self._speculator.propose([t.read() for t in ready], len(ready), limits)
        return list(zip(ready, drafts, strict=True))

    def _set_situation(self, schedulers: Sequence[Scheduler], ready: int) -> int:
        """Tells the cost what the coming step has beside drafts; the most drafts that a row of it may have."""
        config = schedulers[0].config
        sequences = max(scheduler.num_running for scheduler in schedulers)
        decodes = sum(scheduler.num_running for scheduler in schedulers) == ready
        # Who waits for a slot that nobody leaves does not prefill in the coming step.
        admits = any(s.num_waiting and s.num_running < s.config.max_running for s in schedulers)
        prefills = not decodes or admits
        prefill_tokens = config.prefill_chunk if prefills else 0
        self.cost.at(sequences, prefill_tokens)
        if sequences + prefill_tokens >= config.max_batch_tokens:
            return 0
        return self.cost.most_drafts()

"""The engine: runs what the scheduler plans, one step ahead of the tokens it has seen."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from trillion_infer.core.outputs import Logprob
from trillion_infer.core.request import Request, Status
from trillion_infer.engine.batch import BatchLayout, pack_rows
from trillion_infer.engine.buckets import Bucket
from trillion_infer.engine.programs import Programs
from trillion_infer.engine.prompt_scores import PromptScores
from trillion_infer.engine.state import DeviceState, table_chunks
from trillion_infer.sample import RowParams, Sampled
from trillion_infer.sample.bitmask import allow_all, forbid
from trillion_infer.schedule.plan import Row, StepPlan
from trillion_infer.schedule.scheduler import Scheduler


@dataclass
class TokenEvent:
    """What a step brought one request. `finished` says why, if these tokens end it.

    prompt_logprobs comes with the first token of a request that asked for it.
    """

    request: Request
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: Status | None = None
    stop_reason: int | str | None = None

    @property
    def ended_by_token(self) -> bool:
        """The last token is an end-of-sequence or stop token, which is not part of the text."""
        last, request = self.token_ids[-1], self.request
        return self.finished is Status.FINISHED_STOP and (
            last in request.eos_ids or last in (request.params.stop_token_ids or ())
        )


@dataclass
class _Pending:
    """A step sent to the device. `rows[i]` is the request row whose result stands at place `places[i]`."""

    rows: list[Row]
    places: list[int]
    sampled: Sampled
    scores: list[tuple[Row, Any]] = field(default_factory=list)


class Engine:
    """Requests in, token events out. Not thread-safe: one thread owns it.

    One scheduler a `data` shard of the mesh; a request stays with the shard it was given.
    """

    def __init__(
        self, programs: Programs, state: DeviceState, params: Any, schedulers: Sequence[Scheduler], run_ahead: bool
    ):
        self.programs, self.schedulers = programs, list(schedulers)
        self._params, self._state = params, state
        self._depth = 1 if run_ahead else 0
        self._pending: deque[_Pending] = deque()
        self._owner: dict[str, Scheduler] = {}
        self.prompt_scores = PromptScores(programs)
        self.steps = 0
        mesh = programs.mesh
        self._by_data = NamedSharding(mesh, P("data"))
        self._replicated = NamedSharding(mesh, P())
        self._no_mask = jax.device_put(np.False_, self._replicated)
        self._with_mask = jax.device_put(np.True_, self._replicated)
        self._open_masks: dict[int, Any] = {}

    # Requests

    @property
    def has_work(self) -> bool:
        return bool(self._owner) or bool(self._pending)

    def add(self, request: Request) -> None:
        """Queue a request with the data shard that has the fewest. Raises what Scheduler.add raises."""
        scheduler = min(self.schedulers, key=lambda s: s.num_running + s.num_waiting)
        scheduler.add(request)
        self._owner[request.request_id] = scheduler

    def abort(self, request_id: str) -> Request | None:
        """End a request at once; None, without effect, for an id that is not live."""
        scheduler = self._owner.get(request_id)
        request = scheduler.abort(request_id) if scheduler else None
        if request is not None:
            self._forget(request)
        return request

    def finish(self, request: Request, status: Status, stop_reason: int | str | None = None) -> None:
        """End a request (a stop string was found). No effect if it has ended."""
        scheduler = self._owner.get(request.request_id)
        if scheduler is None:
            return
        scheduler.finish(request, status)
        request.stop_reason = stop_reason
        self._forget(request)

    def _forget(self, request: Request) -> None:
        request.metrics.finished_time = time.monotonic()
        self._owner.pop(request.request_id, None)
        self.prompt_scores.forget(request)

    @property
    def pools(self) -> tuple[jax.Array, ...]:
        """The KV pools as the steps sent so far leave them."""
        return self._state.pools

    def replace_pools(self, pools: tuple[jax.Array, ...]) -> None:
        """Puts pools in place into which another pool's pages were written."""
        self._state = DeviceState(pools, self._state.tables, self._state.sampler)

    def adopt(self, request: Request, num_computed: int) -> int | None:
        """Scheduler.adopt with the (one) scheduler of this engine."""
        hit = self.schedulers[0].adopt(request, num_computed)
        if hit is not None:
            self._owner[request.request_id] = self.schedulers[0]
        return hit

    def queued_tokens(self) -> int:
        """Prompt tokens not yet computed, over all requests."""
        return sum(scheduler.queued_tokens() for scheduler in self.schedulers)

    # The step loop

    def step(self) -> list[TokenEvent]:
        """Sends one step to the device, if there is one to plan, and returns what an earlier one brought."""
        plans = [scheduler.schedule() for scheduler in self.schedulers]
        sent = any(plan is not None for plan in plans)
        if sent:
            self._pending.append(self._send(plans))
            self.steps += 1
        events: list[TokenEvent] = []
        while self._pending and (len(self._pending) > self._depth or not sent):
            events += self._receive(self._pending.popleft())
            if not sent:
                break
        return events

    def _send(self, plans: list[StepPlan | None]) -> _Pending:
        for shard, plan in enumerate(plans):
            if plan is not None:
                self._prepare(shard, plan)
        filled = [plan for plan in plans if plan is not None]
        scored = any(self.prompt_scores.wants(row) for plan in filled for row in plan.rows)
        bucket = self.programs.buckets.choose(
            max(plan.num_tokens for plan in filled),
            max(len(plan.rows) for plan in filled),
            decode_only=not scored and all(plan.num_decode == len(plan.rows) for plan in filled),
        )
        layout = BatchLayout(bucket)
        packed = np.zeros((len(plans), layout.size), np.int32)
        forbidden: dict[int, list[int]] = {}
        rows, places = [], []
        for shard, plan in enumerate(plans):
            params = RowParams.padding(bucket.sequences)
            plan_rows = plan.rows if plan else []
            for i, row in enumerate(plan_rows):
                place = shard * bucket.sequences + i
                rows.append(row)
                places.append(place)
                if row.samples:
                    self._fill(row.request, i, params, place, forbidden)
            pack_rows(layout, plan_rows, plan.num_decode if plan else 0, params, packed[shard])
        mask, has_mask = self._mask(bucket, rows, places, forbidden)
        batch = jax.device_put(packed, self._by_data)
        state = self._state
        pools, sampling_rows, logits, hidden = self.programs.forward(bucket).run(
            self._params, state.pools, state.tables, state.sampler.last_token, batch
        )
        sampler, sampled = self.programs.choose(bucket).run(state.sampler, sampling_rows, logits, mask, has_mask)
        self._state = DeviceState(pools, state.tables, sampler)
        sampled.token.copy_to_host_async()
        scores = self.prompt_scores.send(self._params, bucket, hidden, rows, places) if scored else []
        return _Pending(rows, places, sampled, scores)

    def _prepare(self, shard: int, plan: StepPlan) -> None:
        """Page tables and sampler slots as this plan needs them."""
        offset = shard * self.schedulers[shard].config.max_running
        state = self._state
        updates = [(group, slot + offset, block, page) for group, slot, block, page in plan.page_updates]
        for chunk in table_chunks(updates):
            tables = self.programs.update_tables.run(state.tables, chunk)
            state = DeviceState(state.pools, tables, state.sampler)
        now = time.monotonic()
        for request in plan.admitted:
            if request.metrics.first_scheduled_time is None:
                request.metrics.first_scheduled_time = now
            if request.sampling.needs_slot_history:
                for header, chunk in request.sampling.slot_chunks(
                    request.slot + offset, request.prompt_ids, request.output_ids
                ):
                    sampler = self.programs.init_slot.run(state.sampler, header, chunk)
                    state = DeviceState(state.pools, state.tables, sampler)
        self._state = state

    def _fill(self, request: Request, i: int, params: RowParams, place: int, forbidden: dict[int, list[int]]) -> None:
        """Sampling parameters of row i, and the tokens its mask must exclude.

        The scheduler has counted this row's token as in flight already, so it is number num_output - 1.
        """
        index = request.num_output - 1
        sampling = request.sampling
        sampling.fill(params, i, slot=request.slot, index=index)
        banned = list(sampling.bad_words.next_forbidden(request.output_ids)) if sampling.needs_last_tokens else []
        if index < sampling.params.min_tokens:
            banned.extend(sampling.guarded)
        if banned:
            forbidden[place] = banned

    def _mask(
        self, bucket: Bucket, rows: list[Row], places: list[int], forbidden: dict[int, list[int]]
    ) -> tuple[Any, Any]:
        """Allowed-token bits of the rows; an array that lies on the device already where every token is allowed."""
        total = bucket.sequences * len(self.schedulers)
        words = -(-self._state.sampler_vocab // 32)
        grammars = [
            (row, place) for row, place in zip(rows, places, strict=True) if row.samples and row.request.grammar
        ]
        if not forbidden and not grammars:
            if total not in self._open_masks:
                self._open_masks[total] = jax.device_put(allow_all(total, words * 32), self._replicated)
            return self._open_masks[total], self._no_mask
        mask = allow_all(total, words * 32)
        for row, place in grammars:
            row.request.grammar.mask(mask[place])
        for place, tokens in forbidden.items():
            forbid(mask[place], tokens)
        return jax.device_put(mask, self._replicated), self._with_mask

    def _receive(self, pending: _Pending) -> list[TokenEvent]:
        """Waits for a step and hands its tokens to their requests."""
        tokens = np.asarray(pending.sampled.token)
        self.prompt_scores.receive(pending.scores)
        wants = any(row.samples and row.request.params.logprobs is not None for row in pending.rows)
        scores = jax.device_get(pending.sampled) if wants else None
        events, now = [], time.monotonic()
        for row, place in zip(pending.rows, pending.places, strict=True):
            if row.samples:
                event = self._deliver(row, int(tokens[place]), scores, place, now)
                if event is not None:
                    events.append(event)
        return events

    def _deliver(self, row: Row, token: int, scores: Sampled | None, place: int, now: float) -> TokenEvent | None:
        request = row.request
        scheduler = self._owner.get(request.request_id)
        owned = scheduler is not None and not request.status.is_finished
        (scheduler or self.schedulers[0]).complete(row, [token])
        if not owned:
            return None
        metrics = request.metrics
        metrics.first_token_time = metrics.first_token_time or now
        metrics.last_token_time = now
        metrics.token_times.append(now)
        event = TokenEvent(request, [token])
        if request.params.logprobs is not None:
            assert scores is not None
            event.logprobs = [read_logprobs(scores, place, token, request.params.logprobs)]
        if len(request.output_ids) == 1:
            event.prompt_logprobs = self.prompt_scores.pop(request)
        if request.grammar is not None:
            request.grammar.accept([token])
        self._check_end(event, token)
        return event

    def _check_end(self, event: TokenEvent, token: int) -> None:
        """Ends the request at end-of-sequence, a stop token or its last token."""
        request, params = event.request, event.request.params
        if token in (params.stop_token_ids or ()):
            event.finished, event.stop_reason = Status.FINISHED_STOP, token
        elif (token in request.eos_ids and not params.ignore_eos) or (
            request.grammar is not None and request.grammar.is_complete
        ):
            event.finished = Status.FINISHED_STOP
        if event.finished is None and len(request.output_ids) >= request.max_tokens:
            event.finished = Status.FINISHED_LENGTH
        if event.finished is not None:
            self.finish(request, event.finished, event.stop_reason)

    # Figures

    def drain(self) -> None:
        """Waits for steps in flight; their tokens go to requests that are still live."""
        while self._pending:
            self._receive(self._pending.popleft())

    def stats(self) -> dict[str, int]:
        """Sums over data shards of the schedulers' figures, and the engine's own counters."""
        total: dict[str, int] = {"steps": self.steps, "compilations": self.programs.compiled}
        for scheduler in self.schedulers:
            for name, value in scheduler.stats().items():
                total[name] = total.get(name, 0) + value
        return total

    def memory(self) -> dict[str, int]:
        """Bytes of what stays on the devices besides weights, by holder."""
        state = self._state
        layouts = self.schedulers[0].cache.groups
        pools = {f"kv_{g.group.name}": pool.nbytes for g, pool in zip(layouts, state.pools, strict=True)}
        sampler = sum(leaf.nbytes for leaf in jax.tree.leaves(state.sampler))
        return {**pools, "page_tables": sum(table.nbytes for table in state.tables), "sampler": sampler}

    def close(self) -> None:
        """Waits for the device and drops every array. The engine is of no use afterwards."""
        for request_id in list(self._owner):
            self.abort(request_id)
        self.drain()
        for leaf in jax.tree.leaves((self._state, self._params)):
            leaf.delete()

    def check_integrity(self) -> None:
        """Raises AssertionError if a page, slot or request is lost."""
        for scheduler in self.schedulers:
            scheduler.check_integrity()


def read_logprobs(scores: Any, place: int, token: int, count: int) -> dict[int, Logprob]:
    """The chosen token and the `count` likeliest of one row, from host arrays of a Sampled or of `score`."""
    found = {token: Logprob(float(scores.logprob[place]), int(scores.rank[place]))}
    for rank, (other, value) in enumerate(
        zip(scores.top_ids[place][:count].tolist(), scores.top_logprobs[place][:count].tolist(), strict=True), start=1
    ):
        if other not in found:
            found[other] = Logprob(value, rank)
    return found

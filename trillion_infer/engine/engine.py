"""The engine: runs what the scheduler plans, one step ahead of the tokens it has seen."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from trillion_infer.core.request import Request, Status
from trillion_infer.engine.batch import BatchLayout, pack_rows
from trillion_infer.engine.buckets import Bucket, Buckets
from trillion_infer.engine.events import TokenEvent
from trillion_infer.engine.figures import Figures
from trillion_infer.engine.keeping import KeepsBlocks
from trillion_infer.engine.masks import TokenMasks
from trillion_infer.engine.programs import Programs
from trillion_infer.engine.prompt_scores import PromptScores
from trillion_infer.engine.results import Pending, fetch_scores, new_tokens, read_logprobs
from trillion_infer.engine.state import DeviceState, table_chunks
from trillion_infer.layers.pools import Pool
from trillion_infer.sample import Sampled, Verified
from trillion_infer.sample.table import RowTable
from trillion_infer.schedule.plan import Row, StepPlan
from trillion_infer.schedule.scheduler import Scheduler

if TYPE_CHECKING:
    from trillion_infer.engine.drafting import ModelDrafter
    from trillion_infer.engine.guard import BatchGuard
    from trillion_infer.engine.speculation import Speculation
    from trillion_infer.engine.tiering import KVTiering


class Engine(KeepsBlocks, Figures):
    """Requests in, token events out. Not thread-safe: one thread owns it.

    One scheduler a `data` shard of the mesh; a request stays with the shard it was given. With `speculation`, steps
    in flight are waited for as long as drafts are at hand.
    """

    def __init__(
        self,
        programs: Programs,
        state: DeviceState,
        params: Any,
        schedulers: Sequence[Scheduler],
        run_ahead: bool,
        speculation: "Speculation | None" = None,
    ):
        self.programs, self.schedulers = programs, list(schedulers)
        self._params, self._state = params, state
        self._depth = 1 if run_ahead else 0
        self._pending: deque[Pending] = deque()
        self._owner: dict[str, Scheduler] = {}
        self._layouts: dict[Bucket, BatchLayout] = {}
        self._rows = [RowTable(scheduler.config.max_running) for scheduler in schedulers]
        self.prompt_scores = PromptScores(programs)
        self.speculation = speculation
        self._buckets: Buckets | None = None
        self.tiering: KVTiering | None = None
        self.guard: BatchGuard | None = None
        self.on_finish: Callable[[Request, Scheduler], None] | None = None
        """Called with a request that ends, before it gives its pages back."""
        self.drafters: list[ModelDrafter] = []
        self.steps = 0
        self._received = 0.0
        self._masks = TokenMasks(programs, state.sampler_vocab)

    # Requests

    @property
    def has_work(self) -> bool:
        return bool(self._owner) or bool(self._pending)

    def add(self, request: Request) -> None:
        """Queue a request with the data shard that has the fewest, a session's with the one that has most of its KV.

        Raises what Scheduler.add raises.
        """

        def rank(scheduler: Scheduler) -> tuple[int, int]:
            hit = scheduler.cache.match(request) if request.session_id and len(self.schedulers) > 1 else 0
            return -hit, scheduler.num_running + scheduler.num_waiting

        scheduler = min(self.schedulers, key=rank)
        scheduler.add(request)
        self._owner[request.request_id] = scheduler
        if self.tiering is not None:
            self.tiering.promoter.watch(request, self.schedulers.index(scheduler))

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
        if self.on_finish is not None:
            self.on_finish(request, scheduler)
        scheduler.finish(request, status)
        request.stop_reason = stop_reason
        self._forget(request)

    def _forget(self, request: Request) -> None:
        request.metrics.finished_time = time.monotonic()
        self._owner.pop(request.request_id, None)
        self.prompt_scores.forget(request)
        if self.tiering is not None:
            self.tiering.promoter.forget(request)
        if self.speculation is not None:
            self.speculation.release(request)

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The KV pools as the steps sent so far leave them."""
        return self._state.kv_pools

    @property
    def all_pools(self) -> tuple[Pool, ...]:
        """`pools`, and those of models that draft: all that is known of a sequence."""
        return (*self.pools, *(pool for drafter in self.drafters for pool in drafter.pools))

    @property
    def params(self) -> Any:
        """The parameters on the mesh, by path."""
        return self._params

    def replace_pools(self, pools: tuple[Pool, ...]) -> None:
        """Puts pools in place into which another pool's pages were written: those of `pools`, or of `all_pools`."""
        state, count = self._state, len(self.pools)
        self._state = DeviceState((*pools[:count], *state.pools[count:]), state.tables, state.sampler)
        rest = iter(pools[count:])
        for drafter in self.drafters if len(pools) > count else ():
            drafter.pools = tuple(islice(rest, len(drafter.pools)))

    def activate(self, request: Request, num_computed: int, shard: int = 0) -> None:
        """Scheduler.activate with the scheduler of a data shard."""
        self.schedulers[shard].activate(request, num_computed)
        self._owner[request.request_id] = self.schedulers[shard]

    def shard_of(self, request_id: str) -> int:
        """The data shard that a live request was given."""
        return self.schedulers.index(self._owner[request_id])

    def wake_by(self, wake: Callable[[], None]) -> None:
        """Takes a function that wakes a sleeping loop; work comes by `add` alone here, so it is not needed."""

    def guarded(self) -> AbstractContextManager[None]:
        """Around what runs on the devices: says why it fails, where something else than this process is the cause."""
        return nullcontext()

    def queued_tokens(self) -> int:
        """Prompt tokens not yet computed, over all requests."""
        return sum(scheduler.queued_tokens() for scheduler in self.schedulers)

    # The step loop

    @property
    def is_in_flight(self) -> bool:
        """A step that was sent has not been received."""
        return bool(self._pending)

    def step(self, waits: bool = True) -> list[TokenEvent]:
        """Sends one step to the device, if there is one to plan, and returns what an earlier one brought.

        waits: for an earlier one, where as many are in flight as may be; else nothing is sent then, nor before the
        caller has seen what that one brought: pages of requests that it ended are there to be read until then.
        """
        begun, events = time.monotonic(), []
        while not waits and len(self._pending) > self._depth:
            if not self._pending[0].is_ready:
                return events
            events += self._receive(self._pending.popleft())
        if events:
            return events
        buckets = self._ready_buckets()
        if self.speculation is not None:
            events += self._draft(self.speculation)
        if self.tiering is not None:
            is_idle = waits and not self._pending and not any(s.num_running > s.num_layered for s in self.schedulers)
            self.replace_pools(self.tiering.promote(self.all_pools, is_idle))
        lookahead = self.speculation.lookahead(self.schedulers) if self.speculation is not None else 0
        plans = [scheduler.schedule(lookahead) for scheduler in self.schedulers]
        if self.tiering is not None:
            self.tiering.save_evicted(self.all_pools)
        sent = any(plan is not None for plan in plans)
        if sent:
            compiled = self.programs.compiled
            self._pending.append(self._send(plans, begun, buckets))
            if self.programs.compiled != compiled or self.programs.coming:
                self._pending[-1].begun = None
            self.steps += 1
        while self._pending and (len(self._pending) > self._depth or not sent):
            if not (waits or self._pending[0].is_ready):
                break
            events += self._receive(self._pending.popleft())
            if not sent:
                break
        return events

    def _ready_buckets(self) -> Buckets:
        """The buckets that need no waiting; no step is planned larger than those hold."""
        ready = self.programs.ready
        if ready is not self._buckets:
            self._buckets, largest = ready, max(ready.mixed)
            for scheduler in self.schedulers:
                scheduler.limit(largest.tokens, largest.sequences)
        return ready

    def _draft(self, speculation: "Speculation") -> list[TokenEvent]:
        """Gives requests drafts, having waited for the steps in flight if that pays; what those brought."""
        events: list[TokenEvent] = []
        if self._pending:
            last = self._pending[-1]
            if not (last.bucket.verifies or last.drafted or speculation.would_draft(self.schedulers)):
                return events
            while self._pending:
                events += self._receive(self._pending.popleft())
        speculation.assign(self.schedulers)
        return events

    def _send(self, plans: list[StepPlan | None], begun: float, buckets: Buckets) -> Pending:
        for shard, plan in enumerate(plans):
            if plan is not None:
                self.prepare(shard, plan)
        filled = [plan for plan in plans if plan is not None]
        scored = any(
            self.prompt_scores.wants(row) for plan in filled for row in plan.rows if row.length > 1 or not row.samples
        )
        bucket = buckets.choose(
            max(plan.num_tokens for plan in filled),
            max(len(plan.rows) for plan in filled),
            decode_only=not scored and all(plan.num_decode == len(plan.rows) for plan in filled),
            width=1 + max((len(row.draft_ids) for plan in filled for row in plan.rows), default=0),
        )
        rows, places, batch = self._pack(bucket, plans)
        state = self._state
        pools, sampling_rows, logits, hidden, *extras = self.programs.forward(bucket).run(
            self._params, state.pools, state.tables, state.sampler.last_token, batch
        )
        self._state = DeviceState(pools, state.tables, state.sampler)
        sampled = self._choose(bucket, len(plans), rows, places, sampling_rows, logits)
        scores = self.prompt_scores.send(self._params, bucket, hidden, rows, places) if scored else []
        pending = Pending(bucket, rows, places, sampled, begun, scores)
        if self.drafters:
            from trillion_infer.engine.drafting import wanted_rows

            wanted = wanted_rows(plans, bucket.sequences) if any(row.lookahead for row in rows) else None
            for drafter in self.drafters:
                drafted = drafter.follow(bucket, self._state, batch, hidden, extras[0], sampled, wanted)
                pending.drafted += [drafted] if drafted is not None else []
        return pending

    def _pack(self, bucket: Bucket, plans: Sequence[StepPlan | None]) -> tuple[list[Row], list[int], Any]:
        """The plans' rows, their places among all shards' rows of the bucket, and the batch of them."""
        layout = self._layouts.setdefault(bucket, BatchLayout(bucket))
        packed = np.zeros((len(plans), layout.size), np.int32)
        rows, places = [], []
        for shard, plan in enumerate(plans):
            plan_rows = plan.rows if plan else []
            first = shard * bucket.sequences
            rows += plan_rows
            places += range(first, first + len(plan_rows))
            pack_rows(layout, plan_rows, plan.num_decode if plan else 0, self._rows[shard], packed[shard])
        if self.guard is not None:
            self.guard.check(layout, packed, self._state)
        # On one device the call itself takes the array there, in less time.
        batch = packed if self.programs.mesh.devices.size == 1 else self.programs.place(packed, P("data"))
        return rows, places, batch

    def _choose(
        self, bucket: Bucket, shards: int, rows: list[Row], places: list[int], sampling_rows: Any, logits: Any
    ) -> Sampled | Verified:
        """Samples the rows' tokens, on their way to the host."""
        mask, has_mask = self._masks.make(bucket, shards, rows, places)
        state = self._state
        sampler, sampled = self.programs.choose(bucket).run(state.sampler, sampling_rows, logits, mask, has_mask)
        self._state = DeviceState(state.pools, state.tables, sampler)
        (sampled.tokens if bucket.verifies else sampled.token).copy_to_host_async()
        return sampled

    def send_layers(
        self, bucket: Bucket, plans: Sequence[StepPlan | None], x: Any, between: np.ndarray, is_last: bool
    ) -> Any:
        """Sends a part of a step of a layered bucket: the repeats `between` two numbers of the model's segments, on
        what those before left, x. Returns what they leave. With the last ones the step is in flight like any other."""
        rows, places, batch = self._pack(bucket, plans)
        state = self._state
        pools, sampling_rows, logits, x = self.programs.forward(bucket).run(
            self._params, state.pools, state.tables, state.sampler.last_token, batch, x, between
        )
        self._state = DeviceState(pools, state.tables, state.sampler)
        if is_last:
            sampled = self._choose(bucket, len(plans), rows, places, sampling_rows, logits)
            self._pending.append(Pending(bucket, rows, places, sampled, None))
            self.steps += 1
        return x

    def prepare(self, shard: int, plan: StepPlan) -> None:
        """Page tables and sampler slots as this plan needs them."""
        offset = shard * self.schedulers[shard].config.max_running
        state = self._state
        updates = [(group, slot + offset, block, page) for group, slot, block, page in plan.page_updates]
        for chunk in table_chunks(updates):
            tables = self.programs.update_tables.run(state.tables, chunk)
            state = DeviceState(state.pools, tables, state.sampler)
        now = time.monotonic()
        for request in plan.admitted:
            self._rows[shard].enter(request.slot, request.sampling)
            if request.metrics.first_scheduled_time is None:
                request.metrics.first_scheduled_time = now
            if request.sampling.needs_slot_history:
                for header, chunk in request.sampling.slot_chunks(
                    request.slot + offset, request.prompt_ids, request.output_ids
                ):
                    sampler = self.programs.init_slot.run(state.sampler, header, chunk)
                    state = DeviceState(state.pools, state.tables, sampler)
        self._state = state

    def _receive(self, pending: Pending) -> list[TokenEvent]:
        """Waits for a step and hands its tokens to their requests."""
        tokens = new_tokens(pending.sampled)
        self._time(pending)
        self.prompt_scores.receive(pending.scores)
        wants = any(row.samples and row.request.params.logprobs is not None for row in pending.rows)
        scores = fetch_scores(pending.sampled) if wants else None
        events, now = [], time.monotonic()
        for row, place in zip(pending.rows, pending.places, strict=True):
            if row.samples and scores is None and self._is_plain(row.request):
                events.append(self._deliver_plain(row, tokens[place], now))
            elif row.samples:
                events += self._deliver(row, tokens[place], scores, place * pending.bucket.width, now)
        if self.speculation is not None:
            for drafted in pending.drafted:
                self.speculation.offer(drafted)
        return events

    def _time(self, pending: Pending) -> None:
        """Tells speculation and tiers what a step took: from its beginning, or the result before it, to its own."""
        now = time.monotonic()
        if pending.begun is not None:
            seconds = now - max(pending.begun, self._received)
            if self.speculation is not None and (pending.bucket.verifies or not pending.drafted):
                self.speculation.cost.record_step(pending.bucket, seconds)
            if self.tiering is not None:
                prefilled = sum(row.length for row in pending.rows if row.length > 1)
                self.tiering.promoter.record_prefill(prefilled, seconds)
        if self.tiering is not None:
            self.tiering.promoter.record_result(row.request for row in pending.rows)
        self._received = now

    def _is_plain(self, request: Request) -> bool:
        """The request lives and its one new token needs nothing but a check whether it is the last."""
        return self.speculation is None and request.grammar is None and request.status is Status.RUNNING

    def _deliver_plain(self, row: Row, tokens: list[int], now: float) -> TokenEvent:
        """`_deliver` for the one token of a plain request."""
        request, event = row.request, TokenEvent(row.request, tokens)
        metrics, known = request.metrics, len(request.output_ids)
        if metrics.first_token_time is None:
            metrics.first_token_time = now
        if known == 0:
            event.prompt_logprobs = self.prompt_scores.pop(request)
        metrics.last_token_time = now
        metrics.token_times.append(now)
        event.check_end(known + 1)
        self._owner[request.request_id].complete(row, tokens)
        if event.finished is not None:
            self.finish(request, event.finished, event.stop_reason)
        return event

    def _deliver(
        self, row: Row, tokens: list[int], scores: Sampled | Verified | None, first: int, now: float
    ) -> list[TokenEvent]:
        """One event a token, up to the token that ends the request. `scores` of the first stand at place `first`."""
        request = row.request
        scheduler = self._owner.get(request.request_id)
        if self.speculation is not None:
            self.speculation.record(row, len(tokens))
        if scheduler is None or request.status.is_finished:
            (scheduler or self.schedulers[0]).complete(row, tokens)
            return []
        metrics, known = request.metrics, len(request.output_ids)
        metrics.first_token_time = metrics.first_token_time or now
        metrics.last_token_time = now
        events: list[TokenEvent] = []
        for place, token in enumerate(tokens, start=first):
            metrics.token_times.append(now)
            event = TokenEvent(request, [token])
            if request.params.logprobs is not None:
                event.logprobs = [read_logprobs(scores, place, token, request.params.logprobs)]
            events.append(event)
            if request.grammar is not None and (request.grammar.accept([token]) != 1 or request.grammar.error):
                event.finished = Status.FINISHED_ERROR
            else:
                event.check_end(known + len(events))
            if event.finished is not None:
                break
        scheduler.complete(row, tokens[: len(events)])
        if known == 0:
            events[0].prompt_logprobs = self.prompt_scores.pop(request)
        if event.finished is not None:
            self.finish(request, event.finished, event.stop_reason)
        elif self.speculation is not None:
            self.speculation.track(request)
        return events

    # Ends

    def drain(self) -> None:
        """Waits for steps in flight; their tokens go to requests that are still live."""
        while self._pending:
            self._receive(self._pending.popleft())

    def wait_for_programs(self) -> None:
        """Until every program that is made behind the engine is there."""
        self.programs.wait()

    def close(self) -> None:
        """Waits for the device and drops every array. The engine is of no use afterwards."""
        self.programs.stop()
        for request_id in list(self._owner):
            self.abort(request_id)
        self.drain()
        if self.tiering is not None:
            self.tiering.close(self.all_pools)
        for drafter in self.drafters:
            drafter.close()
        for leaf in jax.tree.leaves((self._state, self._params)):
            leaf.delete()

    def check_integrity(self) -> None:
        """Raises AssertionError if a page, slot or request is lost."""
        for scheduler in self.schedulers:
            scheduler.check_integrity()

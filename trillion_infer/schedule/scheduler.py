"""The scheduler: which tokens of which requests the next step computes."""

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import islice

from trillion_infer.cache.kv_cache import KVCache
from trillion_infer.config.scheduler import SchedulerConfig
from trillion_infer.core.errors import InvalidRequestError, QueueFullError
from trillion_infer.core.request import Request, Status
from trillion_infer.schedule.admission import Admission
from trillion_infer.schedule.estimate import OutputLengths
from trillion_infer.schedule.plan import Row, Step, StepPlan, lacks, next_row
from trillion_infer.schedule.queues import RankedList, Ranks


class Scheduler:
    """Plans one step at a time, ahead of the tokens of the step before.

    A plan counts its tokens as computed at once (`num_computed`, `num_in_flight`): steps run in the order planned.
    Requests are served by priority, then arrival. When pages run out the last in that order is preempted: it loses
    its pages and recomputes prompt and known answer later. Nothing here raises for want of pages.
    """

    def __init__(self, config: SchedulerConfig, cache: KVCache):
        self.config = config
        self.cache = cache
        self.preemptions = 0
        self._lengths = OutputLengths(config.expected_output)
        self._admission = Admission(cache, self._lengths, config.max_model_len)
        self._requests: dict[str, Request] = {}
        self._ranks = Ranks()
        self._waiting = RankedList(self._ranks)
        self._running = RankedList(self._ranks)
        self._free_slots = list(range(config.max_running))
        self._most_tokens, self._most_rows = config.max_batch_tokens, config.max_running
        self._preempted: list[Request] = []
        self._adopted: list[Request] = []
        self._planned: list[Row] = []
        self._reserved: set[Request] = set()
        self._awaited: dict[Request, bytes] = {}
        self._on_hold: set[Request] = set()
        # Running requests whose first row, planned here, waits for the pages of its prefix to be filled.
        self._layered: dict[Request, Row] = {}
        # The waiting request that did not fit: looked at again when pages were given back, by a request that left
        # or by a prefill chunk that moved out of a window.
        self._blocked: Request | None = None
        self._chunk_in_flight = False

    @property
    def has_work(self) -> bool:
        """Some request has not finished."""
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_layered(self) -> int:
        """Running requests of which `schedule` plans nothing, since their prefix is on its way."""
        return len(self._layered)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    # Requests come and go

    def add(self, request: Request) -> None:
        """Queue a request; may lower its `max_tokens` if the user left it open.

        Raises InvalidRequestError (can never fit, or its id is in use) and QueueFullError.
        """
        if request.request_id in self._requests:
            raise InvalidRequestError(
                f"Request id {request.request_id!r} is in use; choose another or wait until that request has finished.",
                param="request_id",
            )
        self._admission.check(request)
        limit = self.config.max_waiting
        if limit is not None and len(self._waiting) >= limit:
            raise QueueFullError(
                f"{len(self._waiting)} requests are waiting, and max_waiting is {limit}; try again later."
            )
        request.status = Status.WAITING
        self._requests[request.request_id] = request
        self._ranks.add(request)
        self._waiting.add(request)

    def limit(self, tokens: int, rows: int) -> None:
        """No step from here on has more than so many tokens and rows, nor more than the configuration allows. Requests
        that run already stay, so the limits only ever rise while there are any."""
        self._most_tokens = min(tokens, self.config.max_batch_tokens)
        self._most_rows = min(rows, self.config.max_running)

    @property
    def _has_slot(self) -> bool:
        return bool(self._free_slots) and len(self._running) + len(self._reserved) < self._most_rows

    def check(self, request: Request) -> None:
        """Refuse a request that can never fit here, without queueing it; see `add`."""
        self._admission.check(request)

    def queued_tokens(self) -> int:
        """Tokens of live requests that no step has computed yet."""
        return sum(max(0, r.num_known - r.num_computed) for r in self._requests.values())

    def abort(self, request_id: str) -> Request | None:
        """End a request wherever it stands; None, without effect, if no such request is live."""
        request = self._requests.get(request_id)
        if request is not None:
            self.finish(request, Status.FINISHED_ABORT)
        return request

    def finish(self, request: Request, status: Status) -> None:
        """Free slot and pages; full blocks of known tokens stay in the prefix index. No effect if it has ended."""
        if request.status.is_finished:
            return
        if request.status is Status.RUNNING:
            self._vacate(request)
        else:
            self._waiting.remove(request)
        if status is not Status.FINISHED_ABORT:
            self._lengths.record(len(request.output_ids))
        request.status = status
        self._awaited.pop(request, None)
        self._on_hold.discard(request)
        if self._blocked is request:
            self._blocked = None
        del self._requests[request.request_id]
        self._ranks.remove(request)

    def hold(self, request: Request, is_held: bool = True) -> None:
        """Pass a waiting request over, while its prefix is on its way from a tier, until it is let go again."""
        if is_held:
            self._on_hold.add(request)
        else:
            self._on_hold.discard(request)

    def begin_layered(self, request: Request, num_cached: int, limit: int) -> Row | None:
        """Start a waiting request whose first `num_cached` tokens are on their way into pages that it gets now.

        Returns the row of its next tokens, `limit` at most, which runs as they arrive; `schedule` passes the request
        over until `end_layered`. It may be preempted or ended like any other, and then its row is void. None, without
        effect, where there is no room, others come first, or another request is computing more of its prefix.
        """
        ahead = next((r for r in self._waiting if r is request or r not in self._on_hold), None)
        if not self._has_slot or request.num_in_flight > 0 or ahead is not request or self._should_await(request):
            return None
        promised = self._admission.total_growth(self._running)
        if self._running and not self._admission.fits(request, self.cache.match(request), promised):
            return None
        request.slot = heappop(self._free_slots)
        start = self.cache.attach_around(request, num_cached)
        wanted, length = request.num_known - num_cached, 0
        if start is not None:
            request.num_computed = num_cached
            length = self.cache.fit(request, num_cached + min(limit, wanted)) - num_cached
        enough = length >= (1 if self.config.chunked_prefill else wanted)
        if start is None or not enough or not self.cache.allocate(request, num_cached + length):
            self.cache.release(request)
            heappush(self._free_slots, request.slot)
            request.slot, request.num_computed = -1, 0
            return None
        self._waiting.remove(request)
        self._on_hold.discard(request)
        self._running.add(request)
        request.status, request.num_computed = Status.RUNNING, start
        row = self._layered[request] = Row(request, num_cached, length, False)
        return row

    def is_layered(self, request: Request) -> bool:
        """It was begun by `begin_layered`, and neither ended nor preempted since."""
        return request in self._layered

    def end_layered(self, request: Request) -> Row:
        """Its prefix is in its pages, and its row, which is returned, is about to be sent: go on as with any other."""
        row = self._layered.pop(request)
        request.num_computed = row.start
        if request.metrics.preemptions == 0:
            request.num_cached_tokens = row.start
        self.cache.fill(request, row.start)
        row = next_row(request, row.length)
        self.cache.commit(request)
        return row

    def drop_layered(self, request: Request) -> None:
        """Its prefix does not come: the request waits again, on hold, and holds nothing."""
        self._vacate(request)
        request.status = Status.WAITING
        self._waiting.add(request)
        self._on_hold.add(request)

    def reserve(self, request: Request, num_computed: int, by_growth: bool = False) -> int | None:
        """A slot, and pages for `num_computed` positions that another pool will compute: all of them or nothing.

        Returns how many of them the prefix index holds already (a multiple of the page size), or None, without effect,
        while there is no room. The KV of the others goes into the pages it now holds. `by_growth`: only if the answers
        of all requests that run or have reserved are expected to fit beside this one's. `activate` or `unreserve`
        follows.
        """
        assert request.request_id not in self._requests, f"request {request.request_id} is here already"
        if not self._has_slot:
            return None
        hit = min(self.cache.match(request), num_computed)
        others = [*self._running, *self._reserved]
        if by_growth and others and not self._admission.fits(request, hit, self._admission.total_growth(others)):
            return None
        request.slot = heappop(self._free_slots)
        self.cache.attach(request, hit)
        request.num_computed = num_computed
        if not self.cache.allocate(request, num_computed + 1):
            self.cache.release(request)
            heappush(self._free_slots, request.slot)
            request.slot, request.num_computed = -1, 0
            return None
        self._reserved.add(request)
        return hit

    def activate(self, request: Request, num_computed: int) -> None:
        """Run a request with a reservation: its first `num_computed` positions are in its pages."""
        self._reserved.remove(request)
        request.num_computed = num_computed
        request.status = Status.RUNNING
        self._requests[request.request_id] = request
        self._ranks.add(request)
        self._running.add(request)
        self._adopted.append(request)

    def unreserve(self, request: Request) -> None:
        """Give a reservation back; the request may be added, or reserve again, afterwards."""
        self._reserved.remove(request)
        self.cache.release(request)
        heappush(self._free_slots, request.slot)
        request.slot, request.num_computed = -1, 0
        self._blocked = None

    def complete(self, row: Row, token_ids: Sequence[int]) -> bool:
        """Hand over the ids sampled by a row; False if the request has ended and they were dropped.

        A verification row yields 1 to length ids: positions computed from rejected drafts are rewound. Call it for
        rows in the order of their steps; rows that do not sample may be passed with no ids, or left out.
        """
        request = row.request
        if row.samples:
            request.num_in_flight -= 1
        if request.status.is_finished:
            return False
        request.output_ids.extend(token_ids)
        if request.status is Status.RUNNING:
            if row.draft_ids:
                request.num_computed = row.start + len(token_ids)
                self.cache.rewind(request, request.num_computed)
                self.cache.commit(request)
            elif min(request.num_known, request.num_computed) % self.cache.page_size == 0:
                self.cache.commit(request)
        return True

    # One step

    def schedule(self, lookahead: int = 0) -> StepPlan | None:
        """Plan the next step; None if nothing can run until tokens in flight are known (or there is no work).

        lookahead: positions beyond each sampling row for which free pages are held too, where there are any.
        """
        step = Step(self.config, self._most_tokens)
        self._commit_planned()
        ready, longer = self._lacking()
        self._plan_decodes(ready, len(longer) > 0, step)
        self._plan_prefills(longer, step)
        self._admit(step)
        others = [row for row in step.rows if row.length > 1]
        self._chunk_in_flight = len(others) > 0
        self._planned = step.rows
        if not step.rows:
            self._adopted += step.admitted  # without pages yet; the plan that first has them says that they came
            return None
        for row in step.rows if lookahead else ():
            end = row.start + row.length + lookahead
            wanted = row.samples and row.request.num_output + 1 < row.request.max_tokens
            row.lookahead = wanted and end <= self.config.max_model_len and self.cache.reserve(row.request, end)
        preempted, self._preempted = self._preempted, []
        adopted = [request for request in self._adopted if request.slot >= 0]
        self._adopted.clear()
        rows = [*(row for row in step.rows if row.length == 1), *others] if others else step.rows
        num_decode = len(rows) - len(others)
        return StepPlan(rows, adopted + step.admitted, preempted, self.cache.drain_updates(), num_decode)

    def _commit_planned(self) -> None:
        """Names the blocks that the last plan filled; those that tokens fill are named when they arrive."""
        size = self.cache.page_size
        for row in self._planned:
            if row.length > 1 or row.request.num_computed % size == 0:
                self.cache.commit(row.request)
        for request in self._adopted:
            self.cache.commit(request)

    def _lacking(self) -> tuple[list[Request], list[Request]]:
        """Running requests that lack one token and may run, and those that lack more."""
        ready, longer = [], []
        for request in self._running:
            if request in self._layered:
                continue
            count = lacks(request)
            if count > 1:
                longer.append(request)
            elif count == 1 and (request.num_in_flight == 0 or not request.needs_known_tokens):
                ready.append(request)
        return ready, longer

    def _plan_decodes(self, ready: list[Request], prefilling: bool, step: Step) -> None:
        starting = len(self._waiting) > 0 and self._has_slot
        prefilling = prefilling or starting
        spare = self.config.max_batch_tokens - len(ready)
        spare -= self.config.prefill_chunk if prefilling else 0
        for request in ready:
            if request.status is not Status.RUNNING:
                continue
            start, drafts = request.num_computed, ()
            if request.draft_ids:
                if request.num_in_flight == 0:
                    room = min(spare, request.max_tokens - request.num_output - 1)
                    room = min(room, self.cache.fit(request, start + 1 + max(room, 0)) - start - 1)
                    drafts = request.draft_ids[: max(room, 0)]
                request.draft_ids = ()
            length = 1 + len(drafts)
            if self.cache.allocate(request, start + length) or self._make_room(request, start + length, step):
                spare -= len(drafts)
                request.num_computed += length
                request.num_in_flight += 1
                step.add(Row(request, start, length, True, drafts))

    def _plan_prefills(self, longer: list[Request], step: Step) -> None:
        for request in longer:
            if step.room_for_prefill < 1:
                return
            if request.status is Status.RUNNING:
                self._plan_prefill(request, step)

    def _plan_prefill(self, request: Request, step: Step) -> None:
        """The next chunk: as much as the budgets and pages allow, at least one token if preemption can make room."""
        start, length = request.num_computed, lacks(request)
        if length > step.room_for_prefill and not self.config.chunked_prefill:
            return
        length = min(length, step.room_for_prefill)
        length = max(1, min(length, self.cache.fit(request, start + length) - start))
        if self._make_room(request, start + length, step):
            step.prefill_left -= length
            step.add(next_row(request, length))

    def _make_room(self, request: Request, upto_tokens: int, step: Step) -> bool:
        """Allocate pages; preempts requests that rank lower and are not in this step. False if that is not enough."""
        while not self.cache.allocate(request, upto_tokens):
            victim = next((r for r in reversed(self._running) if r not in step.planned and lacks(r) > 0), None)
            if victim is None or self._ranks[victim] <= self._ranks[request]:
                return False
            self._preempt(victim)
        return True

    def _preempt(self, request: Request) -> None:
        self._vacate(request)
        request.status = Status.WAITING
        request.metrics.preemptions += 1
        self.preemptions += 1
        self._preempted.append(request)
        self._waiting.add(request)

    def _vacate(self, request: Request) -> None:
        """Give slot and pages back."""
        self._layered.pop(request, None)
        self.cache.commit(request)
        self.cache.release(request)
        self._running.remove(request)
        heappush(self._free_slots, request.slot)
        request.slot = -1
        request.num_computed = 0
        request.draft_ids = ()
        self._blocked = None

    # Admission

    def _admit(self, step: Step) -> None:
        """Start waiting requests in rank order while slots, budget and expected pages allow.

        One whose prefix another request is computing right now is passed over until those pages can be shared.
        """
        if not self._has_slot or not self._waiting or step.room_for_prefill < 1:
            return
        promised = None
        for request in self._candidates():
            if not self._has_slot or step.room_for_prefill < 1:
                return
            if request in self._on_hold:
                continue
            if request.num_in_flight > 0 or (request is self._blocked and not self._chunk_in_flight):
                return
            if self._should_await(request):
                continue
            hit = self.cache.match(request)
            if not self.config.chunked_prefill and request.num_known - hit > step.room_for_prefill:
                return
            if promised is None:
                promised = self._admission.total_growth(self._running)
            if self._running and not self._admission.fits(request, hit, promised):
                self._blocked = request
                return
            self._start(request, hit, step)
            self._plan_prefill(request, step)
            promised = [p + g for p, g in zip(promised, self._admission.growth(request), strict=True)]

    def _candidates(self) -> list[Request]:
        """The waiting requests that one step can consider."""
        return list(islice(self._waiting, len(self._free_slots) + self.config.max_running))

    def _should_await(self, request: Request) -> bool:
        name = self._awaited.get(request) or self.cache.awaited(request)
        if name is None or not self.cache.is_computing(name):
            self._awaited.pop(request, None)
            return False
        self._awaited[request] = name
        return True

    def _start(self, request: Request, hit: int, step: Step) -> None:
        self._waiting.remove(request)
        request.slot = heappop(self._free_slots)
        request.status = Status.RUNNING
        request.num_computed = hit
        if request.metrics.preemptions == 0:
            request.num_cached_tokens = hit
        self.cache.attach(request, hit)
        self._running.add(request)
        step.admitted.append(request)

    # Figures and checks

    def stats(self) -> dict[str, int]:
        """Requests by state, preemptions, and the figures of the cache."""
        return {
            "running": len(self._running),
            "waiting": len(self._waiting),
            "preemptions": self.preemptions,
            **self.cache.stats(),
        }

    def check_integrity(self) -> None:
        """Raises AssertionError when a slot, page or request is lost or doubled."""
        self.cache.check_integrity()
        slots = sorted([r.slot for r in (*self._running, *self._reserved)] + self._free_slots)
        assert slots == list(range(self.config.max_running)), f"slots in use or free are {slots}"
        live = set(self._waiting) | set(self._running)
        assert live == set(self._requests.values()), "a live request is neither waiting nor running"
        assert len(live) == len(self._waiting) + len(self._running), "a request is both waiting and running"
        for request in self._running:
            for held in self.cache.held(request):
                assert held.end * self.cache.page_size >= request.num_computed, "computed tokens have no page"
        if not self._running and not self._reserved and not self.cache.num_detached:
            for group in self.cache.groups:
                assert group.pool.num_leased == 0, f"group {group.group.name} has leased pages while nothing runs"

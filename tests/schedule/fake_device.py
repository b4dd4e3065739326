"""A device that remembers what was written to each page, and an engine loop that runs one step ahead of the tokens.

What a position holds is a digest of the whole sequence up to it, tenant included; every position that a query sees is
compared with the sequence the request really has, so one stale, shared or lost page fails the run.
"""

import zlib
from collections import deque
from collections.abc import Sequence

from trillion_infer.cache.kv_cache import KVCache
from trillion_infer.cache.naming import BlockNamer
from trillion_infer.config.cache import CacheGroup
from trillion_infer.config.scheduler import SchedulerConfig
from trillion_infer.core.request import Request, Status
from trillion_infer.core.sampling_params import SamplingParams
from trillion_infer.schedule.plan import Row, StepPlan
from trillion_infer.schedule.scheduler import Scheduler

VOCAB = 11
EOS = 0


def make_request(request_id, prompt, max_tokens=8, **fields) -> Request:
    params = fields.pop("params", None) or SamplingParams(temperature=0, max_tokens=max_tokens)
    return Request(str(request_id), list(prompt), params, max_tokens, **fields)


def make_cache(groups=None, page_size=4, **options) -> KVCache:
    groups = groups or [CacheGroup("full", None, 32)]
    return KVCache(groups, page_size, BlockNamer(b"model", b"layout", page_size), **options)


def make_scheduler(groups=None, page_size=4, cache_options=None, **limits) -> Scheduler:
    limits = {"max_running": 4, "max_batch_tokens": 24, "prefill_chunk": 16, "max_model_len": 100, **limits}
    return Scheduler(SchedulerConfig(**limits), make_cache(groups, page_size, **(cache_options or {})))


def digest(request: Request, ids: Sequence[int]) -> int:
    return zlib.crc32(repr((request.cache_salt, request.adapter, list(ids))).encode())


def next_token(request: Request, ids: Sequence[int]) -> int:
    """The model: a token that depends on all before it. EOS is rare."""
    value = digest(request, ids)
    return EOS if value % 17 == 0 else 1 + value // 17 % (VOCAB - 1)


def true_output(request: Request) -> list[int]:
    """What the request must be answered, however it is scheduled."""
    ids = list(request.prompt_ids)
    while len(ids) < len(request.prompt_ids) + request.max_tokens:
        ids.append(next_token(request, ids))
        if ids[-1] in request.eos_ids:
            break
    return ids[len(request.prompt_ids) :]


class FakeDevice:
    """Executes plans in order."""

    def __init__(self, cache: KVCache):
        self.cache = cache
        self.pages = [[[None] * cache.page_size for _ in range(g.pool.num_pages)] for g in cache.groups]
        self.tables: dict[tuple[int, int, int], int] = {}
        self.last_token: dict[int, int] = {}
        self.sampled_ids: dict[Request, list[int]] = {}
        self.computed_tokens = 0

    def run(self, plan: StepPlan) -> list[tuple[Row, list[int]]]:
        for group, slot, block, page in plan.page_updates:
            self.tables[group, slot, block] = page
        inputs = [self._sequence(row) for row in plan.rows]
        for row, ids in zip(plan.rows, inputs, strict=True):
            self._attend_before_others_write(row, ids)
        for row, ids in zip(plan.rows, inputs, strict=True):
            self._write(row, ids)
            self.computed_tokens += row.length
        for row, ids in zip(plan.rows, inputs, strict=True):
            self._attend(row, ids)
        return [(row, self._sample(row, ids)) for row, ids in zip(plan.rows, inputs, strict=True)]

    def _sequence(self, row: Row) -> list[int]:
        """Ids of the positions [0, start + length): those the host knows, else those sampled here before."""
        request, end = row.request, row.start + row.length
        known = request.known_ids()
        if row.draft_ids:
            assert len(known) == row.start + 1, f"{row} drafts after a token that the host does not know"
            return known + list(row.draft_ids)
        if len(known) >= end:
            return known[:end]
        ids = self.sampled_ids[request]
        assert len(ids) == end, f"{row} reads a token that nobody has"
        assert ids[-1] == self.last_token[request.slot], f"the slot of {row} holds another request's token"
        return list(ids)

    def _write(self, row: Row, ids: list[int]) -> list[tuple[list, int, int | None]]:
        """Fill the row's cells; returns (page, offset, content before) of each."""
        before = []
        for group in range(len(self.pages)):
            for i in range(row.start, row.start + row.length):
                page, offset = self._cell(group, row, i)
                before.append((page, offset, page[offset]))
                page[offset] = digest(row.request, ids[: i + 1])
        return before

    def _cell(self, group: int, row: Row, position: int) -> tuple[list, int]:
        size = self.cache.page_size
        page = self.tables[group, row.request.slot, position // size]
        return self.pages[group][page], position % size

    def _attend_before_others_write(self, row: Row, ids: list[int]) -> None:
        """Rows of one step run in any order: none may need what another one writes."""
        before = self._write(row, ids)
        self._attend(row, ids)
        for page, offset, content in before:
            page[offset] = content

    def _attend(self, row: Row, ids: list[int]) -> None:
        for i in range(row.start, row.start + row.length):
            for number, group in enumerate(self.cache.groups):
                for j in range(group.group.first_visible(i), i + 1):
                    page, offset = self._cell(number, row, j)
                    assert page[offset] == digest(row.request, ids[: j + 1]), (
                        f"{row.request.request_id} sees a wrong token at {j} from {i} in group {number}"
                    )

    def _sample(self, row: Row, ids: list[int]) -> list[int]:
        sampled = [next_token(row.request, ids[: i + 1]) for i in range(row.start, row.start + row.length)]
        if not row.samples:
            return []
        if not row.draft_ids:
            sampled = sampled[-1:]
        else:
            accepted = 0
            while accepted < len(row.draft_ids) and row.draft_ids[accepted] == sampled[accepted]:
                accepted += 1
            sampled = sampled[: accepted + 1]
        self.last_token[row.request.slot] = sampled[-1]
        self.sampled_ids[row.request] = ids[: row.start + row.length - len(row.draft_ids)] + sampled
        return sampled


class FakeEngine:
    """Drives a scheduler with `depth` steps in flight; ends requests at EOS or max_tokens."""

    def __init__(self, scheduler: Scheduler, depth: int = 1):
        self.scheduler = scheduler
        self.device = FakeDevice(scheduler.cache)
        self.depth = depth
        self.in_flight: deque[list[tuple[Row, list[int]]]] = deque()
        self.plans: list[StepPlan] = []

    def step(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan is None:
            assert self.in_flight or not self.scheduler.has_work, "nothing runs and nothing is in flight: stuck"
            self.complete_oldest()
            return None
        self._check(plan)
        self.plans.append(plan)
        self.in_flight.append(self.device.run(plan))
        if len(self.in_flight) > self.depth:
            self.complete_oldest()
        return plan

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work and not self.in_flight:
                self.scheduler.check_integrity()
                return
            self.step()
        raise AssertionError(f"requests did not end within {max_steps} steps: {self.scheduler.stats()}")

    def complete_oldest(self) -> None:
        for row, ids in self.in_flight.popleft() if self.in_flight else ():
            self._complete(row, ids)

    def _complete(self, row: Row, ids: list[int]) -> None:
        request = row.request
        for count, token in enumerate(ids, 1):
            if token in request.eos_ids:
                ids = ids[:count]
                break
        if not self.scheduler.complete(row, ids) or not ids:
            return
        if ids[-1] in request.eos_ids:
            self.scheduler.finish(request, Status.FINISHED_STOP)
        elif len(request.output_ids) >= request.max_tokens:
            self.scheduler.finish(request, Status.FINISHED_LENGTH)

    def _check(self, plan: StepPlan) -> None:
        config = self.scheduler.config
        assert plan.rows, "an empty plan"
        assert plan.num_tokens <= config.max_batch_tokens, f"{plan.num_tokens} tokens exceed the batch"
        lengths = [row.length for row in plan.rows]
        assert all(n == 1 for n in lengths[: plan.num_decode]), f"a long row stands among the decodes: {lengths}"
        assert all(n > 1 for n in lengths[plan.num_decode :]), f"a decode stands behind the long rows: {lengths}"
        prefill = sum(row.length for row in plan.rows if row.length > 1 and not row.draft_ids)
        if config.chunked_prefill:
            assert prefill <= config.prefill_chunk, f"{prefill} prefill tokens exceed the chunk"
        slots = [row.request.slot for row in plan.rows]
        assert len(set(slots)) == len(slots), f"two rows use one slot: {slots}"
        places = [update[:3] for update in plan.page_updates]
        assert len(set(places)) == len(places), "a page table entry is updated twice"
        for request in plan.admitted:
            assert request.num_cached_tokens < len(request.prompt_ids), "more cached than the prompt allows"

"""An engine without arrays whose pages move through real tiers: every position that a query sees is checked."""

import struct
from collections.abc import Sequence

from tests.schedule.fake_device import FakeEngine, make_request, make_scheduler, true_output
from trillion_infer.cache.parts import LayerParts
from trillion_infer.cache.tiers.base import Tier, group_of, unit_of
from trillion_infer.cache.tiers.stack import TierStack
from trillion_infer.core.request import Request, Status
from trillion_infer.engine.buckets import Bucket
from trillion_infer.engine.layered import LayeredPrefill, begin_prefill
from trillion_infer.engine.tiering import KVTiering
from trillion_infer.schedule.plan import StepPlan

MODEL = b"m" * 32
PAGE, PARTS = 4, 2
BLOCK_BYTES = 8 * PAGE
HALF = PAGE // PARTS
_CELLS = struct.Struct(f"<{HALF}q")


class FakeCopier:
    """Pages of a FakeDevice as bytes. A pool is its list of pages, one a group. A part of a block, which really is some
    of its layers, is some of its positions here."""

    pages_per_part_call = 3

    def __init__(self, groups: int = 1):
        self.parts = LayerParts((0, 1, 2), ((0, 1, 2),) * groups)
        self.units = [[unit_of(group, part) for part in range(PARTS)] for group in range(groups)]

    def unit_bytes(self, unit: int) -> int:
        return BLOCK_BYTES // PARTS

    def read(self, pools, group: int, pages: Sequence[int]) -> list[bytes]:
        cells = [[-1 if cell is None else cell for cell in pools[group][page]] for page in pages]
        return [_CELLS.pack(*page[start : start + HALF]) for page in cells for start in range(0, PAGE, HALF)]

    def to_bytes(self, data: list[bytes], group: int, count: int) -> list[bytes]:
        return data[: count * PARTS]

    def write(self, pools, group: int, pages: Sequence[int], blocks: Sequence[Sequence[bytes]]):
        for unit, contents in zip(self.units[group], zip(*blocks, strict=True), strict=True):
            self.write_part(pools, unit, pages, contents)
        return pools

    def write_part(self, pools, unit: int, pages: Sequence[int], contents: Sequence[bytes]):
        start = (unit - unit_of(group_of(unit), 0)) * HALF
        for page, content in zip(pages, contents, strict=True):
            pools[group_of(unit)][page][start : start + HALF] = _CELLS.unpack(content)
        return pools


class FakeSteps:
    """Steps by layers of a TieredEngine: all of them with the last, when every position is there."""

    def __init__(self, engine: "TieredEngine", parts: LayerParts):
        self._engine, self.parts = engine, parts

    def new_tokens(self, request, promotion) -> int:
        return 1

    def begin(self, request, shard, promotion, missing) -> LayeredPrefill | None:
        return begin_prefill(self._engine.scheduler, shard, request, promotion, missing, Bucket(8, 1))

    def send(self, prefill: LayeredPrefill, pools):
        engine = self._engine
        while prefill.is_ready:
            prefill.sent += 1
            if prefill.is_sent:
                row = engine.scheduler.end_layered(prefill.request)
                plan = StepPlan([row], [prefill.request], [], engine.scheduler.cache.drain_updates(), 0)
                engine.in_flight.append(engine.device.run(plan))
        return pools


class TieredEngine(FakeEngine):
    """One that gives pages up to `tiers` and brings them back; `by_layers`: wherever a step can run meanwhile."""

    def __init__(self, tiers: Sequence[Tier], groups=None, by_layers: bool = False, **limits):
        super().__init__(make_scheduler(groups, PAGE, **limits))
        copier = FakeCopier(len(self.scheduler.cache.groups))
        steps = FakeSteps(self, copier.parts) if by_layers else None
        self.tiering = KVTiering(TierStack(tiers), [self.scheduler], copier, steps=steps)  # pyright: ignore
        self.tiering.promoter.chooses = not by_layers
        self.steps_held = 0
        self._number = 0

    @property
    def pools(self):
        return tuple(self.device.pages)

    def add(self, prompt: Sequence[int], max_tokens: int = 4, **fields) -> Request:
        self._number += 1
        request = make_request(self._number, prompt, max_tokens, **fields)
        self.scheduler.add(request)
        self.tiering.promoter.watch(request, 0)
        return request

    def step(self):
        is_idle = not self.in_flight and self.scheduler.num_running == self.scheduler.num_layered
        self.tiering.promote(self.pools, is_idle)
        plan = self.scheduler.schedule()
        self.tiering.save_evicted(self.pools)
        if plan is None:
            self.steps_held += not self.in_flight
            self.complete_oldest()
            return None
        self._check(plan)
        self.in_flight.append(self.device.run(plan))
        while len(self.in_flight) > self.depth:
            self.complete_oldest()
        return plan

    def complete_oldest(self) -> None:
        rows = self.in_flight[0] if self.in_flight else []
        super().complete_oldest()
        for row, _ in rows:
            if row.request.status.is_finished:
                self.tiering.promoter.forget(row.request)

    def abort(self, request: Request) -> None:
        self.scheduler.abort(request.request_id)
        self.tiering.promoter.forget(request)

    def answer(self, prompt: Sequence[int], max_tokens: int = 4, **fields) -> int:
        """Runs a request to its end, compares it with the truth; tokens that were found."""
        request = self.add(prompt, max_tokens, **fields)
        self.run()
        assert request.status is not Status.FINISHED_ABORT
        assert request.output_ids == true_output(request)
        return request.num_cached_tokens

    def check_idle(self) -> None:
        """Nothing is held, pinned or on its way."""
        self.scheduler.check_integrity()
        promoter = self.tiering.promoter
        left = (promoter._waiting, promoter._pinned, promoter._watched, promoter._done)
        assert not any(left), left
        assert not self.scheduler._on_hold
        assert not self.scheduler.num_layered
        assert all(not group._pins for group in self.scheduler.cache.groups)

    def close(self) -> None:
        self.tiering.close(self.pools)

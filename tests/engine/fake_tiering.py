"""An engine without arrays whose pages move through real tiers: every position that a query sees is checked."""

import struct
from collections.abc import Sequence

from tests.schedule.fake_device import FakeEngine, make_request, make_scheduler, true_output
from trillion_infer.cache.tiers.base import Tier
from trillion_infer.cache.tiers.stack import TierStack
from trillion_infer.core.request import Request, Status
from trillion_infer.engine.tiering import KVTiering

MODEL = b"m" * 32
PAGE = 4
BLOCK_BYTES = 8 * PAGE
_CELLS = struct.Struct(f"<{PAGE}q")


class FakeCopier:
    """Pages of a FakeDevice as bytes. A pool is its list of pages, one a group."""

    def block_bytes(self, group: int) -> int:
        return BLOCK_BYTES

    def read(self, pools, group: int, pages: Sequence[int]) -> list[bytes]:
        return [_CELLS.pack(*(-1 if cell is None else cell for cell in pools[group][page])) for page in pages]

    def to_bytes(self, data: list[bytes], count: int) -> list[bytes]:
        return data[:count]

    def write(self, pools, group: int, pages: Sequence[int], blocks: Sequence[bytes]):
        for page, block in zip(pages, blocks, strict=True):
            pools[group][page][:] = _CELLS.unpack(block)
        return pools


class TieredEngine(FakeEngine):
    """One that gives pages up to `tiers` and brings them back."""

    def __init__(self, tiers: Sequence[Tier], groups=None, **limits):
        super().__init__(make_scheduler(groups, PAGE, **limits))
        self.tiering = KVTiering(TierStack(tiers), [self.scheduler], FakeCopier())  # pyright: ignore
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
        is_idle = not self.in_flight and not self.scheduler.num_running
        self.tiering.promote(self.pools, is_idle)
        plan = self.scheduler.schedule()
        self.tiering.save_evicted(self.pools)
        if plan is None:
            self.steps_held += not self.in_flight
            self.complete_oldest()
            return None
        self._check(plan)
        self.in_flight.append(self.device.run(plan))
        if len(self.in_flight) > self.depth:
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
        assert all(not group._pins for group in self.scheduler.cache.groups)

    def close(self) -> None:
        self.tiering.close(self.pools)

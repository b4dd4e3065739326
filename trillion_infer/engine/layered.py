"""A request's first step sent some layers at a time, each when its part of the prefix has come back from a tier."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from trillion_infer.cache.parts import LayerParts
from trillion_infer.cache.tiers.promotion import Promotion
from trillion_infer.core.request import Request
from trillion_infer.engine.buckets import Bucket
from trillion_infer.schedule.plan import Row, StepPlan
from trillion_infer.schedule.scheduler import Scheduler

if TYPE_CHECKING:
    from trillion_infer.engine.build import Blueprint
    from trillion_infer.engine.engine import Engine
    from trillion_infer.engine.page_copies import Pools


def can_run_by_layers(blueprint: "Blueprint") -> bool:
    """Prefixes come back from tiers, and a step can be cut between layers.

    Not where models draft (their KV is no run of layers, and they read the step's hidden states), over pipeline stages
    (which cut the layers already), with experts outside the devices (whose cache is decided step by step), nor over
    several processes (which repeat whole steps).
    """
    mesh, has_tiers = blueprint.mesh, blueprint.config.has_tiers or blueprint.shares_tiers
    alone = len({device.process_index for device in mesh.devices.flat}) == 1
    plain = not blueprint.drafts and blueprint.expert_memory is None
    return has_tiers and plain and mesh.shape["stage"] == 1 and alone


@dataclass(eq=False)
class LayeredPrefill:
    """Where such a request stands.

    row: its tokens. pages: of the blocks to be filled, by cache group and name. missing: batches of each part that are
    not in place yet. sent: parts whose layers were sent, which left `x`.
    """

    request: Request
    shard: int
    row: Row
    bucket: Bucket
    pages: list[dict[bytes, int]]
    missing: list[int]
    sent: int = 0
    x: jax.Array | None = None

    @property
    def is_sent(self) -> bool:
        return self.sent == len(self.missing)

    @property
    def is_ready(self) -> bool:
        """The next layers have all that they read."""
        return not self.is_sent and self.missing[self.sent] == 0


class RunsByLayers(Protocol):
    """What the promoter needs of `LayerSteps`."""

    parts: LayerParts

    def begin(
        self, request: Request, shard: int, promotion: Promotion, missing: Sequence[int]
    ) -> LayeredPrefill | None: ...

    def new_tokens(self, request: Request, promotion: Promotion) -> int: ...

    def send(self, prefill: LayeredPrefill, pools: "Pools") -> "Pools": ...


def begin_prefill(
    scheduler: Scheduler, shard: int, request: Request, promotion: Promotion, missing: Sequence[int], bucket: Bucket
) -> LayeredPrefill | None:
    """Starts a request on the pages that its prefix will come to; None, without effect, where it cannot start or
    lacks more by now than is on its way."""
    cache = scheduler.cache
    lacking = [set(group.lacking(promotion.names, promotion.count)) for group in cache.groups]
    if not all(now <= set(planned) for now, planned in zip(lacking, promotion.lacking, strict=True)):
        return None
    row = scheduler.begin_layered(request, promotion.count * cache.page_size, bucket.tokens)
    if row is None:
        return None
    pages = [
        {promotion.names[block]: held.pages[block - held.first] for block in blocks}
        for held, blocks in zip(cache.held(request), lacking, strict=True)
    ]
    return LayeredPrefill(request, shard, row, bucket, pages, list(missing))


class LayerSteps:
    """Sends the layers of such steps between the steps of an engine. One thread, the engine's, owns it."""

    def __init__(self, engine: "Engine", parts: LayerParts):
        self.parts, self._engine = parts, engine
        self._zeros: dict[Bucket, jax.Array] = {}

    def _bucket(self, tokens: int) -> Bucket | None:
        """The smallest that holds them, or the largest there is; None while nothing is compiled yet."""
        buckets = self._engine.programs.ready.layered
        return next((bucket for bucket in buckets if bucket.tokens >= tokens), buckets[-1] if buckets else None)

    def new_tokens(self, request: Request, promotion: Promotion) -> int:
        """Tokens that the step would compute; 0 where there can be no such step yet."""
        new = request.num_known - promotion.count * self._engine.page_size
        bucket = self._bucket(new)
        return min(new, bucket.tokens) if bucket is not None else 0

    def begin(
        self, request: Request, shard: int, promotion: Promotion, missing: Sequence[int]
    ) -> LayeredPrefill | None:
        """See `begin_prefill`. missing: batches of each part."""
        bucket = self._bucket(self.new_tokens(request, promotion))
        if bucket is None:
            return None
        return begin_prefill(self._engine.schedulers[shard], shard, request, promotion, missing, bucket)

    def send(self, prefill: LayeredPrefill, pools: "Pools") -> "Pools":
        """Sends the layers that may run by now, on these pools; the pools with what they write.

        With the last ones the request's tokens count as computed, its first token is sampled and its blocks have names.
        """
        engine, scheduler = self._engine, self._engine.schedulers[prefill.shard]
        if not prefill.is_ready:
            return pools
        engine.replace_pools(pools)
        if prefill.sent == 0:
            updates = scheduler.cache.drain_updates()
            engine.prepare(prefill.shard, StepPlan([], [prefill.request], [], updates, 0))
            prefill.x = self._no_states(prefill.bucket)
        while prefill.is_ready:
            prefill.sent += 1
            row = scheduler.end_layered(prefill.request) if prefill.is_sent else prefill.row
            plans: list[StepPlan | None] = [None] * len(engine.schedulers)
            plans[prefill.shard] = StepPlan([row], [], [], [], int(row.length == 1))
            between = np.array(self.parts.repeats[prefill.sent - 1 : prefill.sent + 1], np.int32)
            prefill.x = engine.send_layers(prefill.bucket, plans, prefill.x, between, prefill.is_sent)
        return engine.all_pools

    def _no_states(self, bucket: Bucket) -> jax.Array:
        """Stands for the residual stream before the first layer."""
        if bucket not in self._zeros:
            programs = self._engine.programs
            shape = (programs.mesh.shape["data"] * bucket.tokens, programs.config.width)
            self._zeros[bucket] = programs.place(np.zeros(shape, programs.ops.dtype), P("data"))
        return self._zeros[bucket]

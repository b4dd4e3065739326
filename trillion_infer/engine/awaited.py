"""Requests that wait for stored prefixes, and what has come for them."""

from collections.abc import Callable
from dataclasses import dataclass, field

from trillion_infer.cache.tiers.base import BlockKey, Tier
from trillion_infer.cache.tiers.fetch import Load, Lookup
from trillion_infer.cache.tiers.promotion import Promotion
from trillion_infer.core.request import Request
from trillion_infer.engine.layered import LayeredPrefill


@dataclass(frozen=True)
class Arrival:
    """Blocks of one group that are in host memory. `restore` gives them pages: (page, its units) of each to write.

    unit: the first of the blocks' units. prefill: the step that waits for this one unit of them, where there is one.
    """

    shard: int
    unit: int
    restore: Callable[[], list[tuple[int, list[bytes]]]]
    prefill: LayeredPrefill | None = None


@dataclass(eq=False)
class Waiting:
    """A request that waits for its prefix: first for `lookup`, then for `load`. `pinned` names stay on the device.

    missing: batches that are not in place. by_layers: of how many batches each part of the layers consists, where the
    request is to run as they arrive, as `prefill` once the first has come.
    """

    request: Request
    shard: int
    preemptions: int
    lookup: Lookup
    deadline: float
    load: Load | None = None
    promotion: Promotion | None = None
    missing: int = 0
    by_layers: list[int] | None = None
    may_run_by_layers: bool = True
    prefill: LayeredPrefill | None = None
    found: dict[BlockKey, Tier] = field(default_factory=dict)
    lost: set[BlockKey] = field(default_factory=set)
    sources: dict[BlockKey, str] = field(default_factory=dict)
    pinned: list[bytes] = field(default_factory=list)

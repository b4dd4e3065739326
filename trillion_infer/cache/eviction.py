"""Which cached page to give up: a policy orders the named pages that nobody holds."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import merge
from itertools import chain

from trillion_infer.core.errors import ConfigError


@dataclass(eq=False)
class Block:
    """A page whose content has a name, and its place among the cached sequences.

    depth: block number in its sequence, 0 for the first.
    parent, children: neighbours in the same index, as long as they are cached.
    hits: times a request found it instead of computing it.
    superseded: its sequence was continued by another branch, as when a chat goes on from an edited turn.
    pins: sessions that want it kept.
    """

    name: bytes
    page: int
    depth: int
    parent: "Block | None" = None
    children: "set[Block]" = field(default_factory=set)
    hits: int = 0
    superseded: bool = False
    pins: int = 0


class EvictionPolicy(ABC):
    """The evictable blocks of one pool, in the order in which they would be given up."""

    @abstractmethod
    def insert(self, block: Block) -> None:
        """`block` is no longer held by any request."""

    @abstractmethod
    def remove(self, block: Block) -> None:
        """`block` is held again, or forgotten."""

    def revalue(self, block: Block) -> None:  # noqa: B027
        """`superseded` or `pins` of an evictable block have changed."""

    @abstractmethod
    def evict(self) -> Block:
        """Remove and return the block worth least. There is at least one."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Block]:
        """In about the order in which `evict` would give them."""


class LeastRecentlyUsed(EvictionPolicy):
    """Gives up the block that became free of holders first."""

    def __init__(self) -> None:
        self._blocks: dict[Block, None] = {}

    def insert(self, block: Block) -> None:
        self._blocks[block] = None

    def remove(self, block: Block) -> None:
        del self._blocks[block]

    def evict(self) -> Block:
        block = next(iter(self._blocks))
        del self._blocks[block]
        return block

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks)


class LeastValuable(EvictionPolicy):
    """Gives up the block with the least expected use.

    Blocks that were hit before live `HIT_LIFETIME` times as long without use as those that were not: what was used
    again once is likelier to be used yet again. Superseded blocks go first, pinned blocks last. Within these classes
    the order is that of release, where a request gives its deepest blocks first. Age counts blocks that became
    evictable, so that an idle cache does not age. Every operation takes constant time.
    """

    HIT_LIFETIME = 1.5

    def __init__(self) -> None:
        self._clock = 0
        self._superseded: dict[Block, int] = {}
        self._fresh: dict[Block, int] = {}
        self._hit: dict[Block, int] = {}
        self._pinned: dict[Block, int] = {}
        self._queues: dict[Block, dict[Block, int]] = {}

    def insert(self, block: Block) -> None:
        self._clock += 1
        queue = self._queue_for(block)
        queue[block] = self._clock
        self._queues[block] = queue

    def remove(self, block: Block) -> None:
        del self._queues.pop(block)[block]

    def revalue(self, block: Block) -> None:
        if self._queues[block] is not self._queue_for(block):
            self.remove(block)
            self.insert(block)

    def evict(self) -> Block:
        block = next(iter(self._superseded or self._older_class() or self._pinned))
        self.remove(block)
        return block

    def _queue_for(self, block: Block) -> dict[Block, int]:
        if block.pins:
            return self._pinned
        if block.superseded:
            return self._superseded
        return self._hit if block.hits else self._fresh

    def _older_class(self) -> dict[Block, int]:
        """Of the fresh and the hit blocks, the class whose oldest is further through its lifetime."""
        if not self._fresh or not self._hit:
            return self._fresh or self._hit
        fresh = self._clock - next(iter(self._fresh.values()))
        hit = self._clock - next(iter(self._hit.values()))
        return self._hit if hit > fresh * self.HIT_LIFETIME else self._fresh

    def __len__(self) -> int:
        return len(self._queues)

    def __iter__(self) -> Iterator[Block]:
        def age(block: Block) -> float:
            queue = self._queues[block]
            return (queue[block] - self._clock) / (self.HIT_LIFETIME if queue is self._hit else 1.0)

        return chain(self._superseded, merge(self._fresh, self._hit, key=age), self._pinned)


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"value": LeastValuable, "lru": LeastRecentlyUsed}
"""By name, the default first."""


def make_policy(name: str) -> EvictionPolicy:
    """A new policy; raises ConfigError for an unknown name."""
    if name not in POLICIES:
        raise ConfigError(f"Eviction policy {name!r} is unknown; choose one of {', '.join(POLICIES)}.")
    return POLICIES[name]()

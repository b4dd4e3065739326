"""Which cached page to give up: a policy orders the named pages that nobody holds."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import chain
from math import log, log2

from trillion_infer.core.errors import ConfigError


@dataclass(eq=False)
class Block:
    """A page whose content has a name, and its place among the cached sequences.

    depth: block number in its sequence, 0 for the first.
    parent, children: neighbours in the same index, as long as they are cached.
    hits: times a request found it instead of computing it.
    growth: blocks that the last request which held it added to its sequence.
    superseded: its sequence was continued by another branch, as when a chat goes on from an edited turn.
    pins: sessions that want it kept.
    """

    name: bytes
    page: int
    depth: int
    parent: "Block | None" = None
    children: "set[Block]" = field(default_factory=set)
    hits: int = 0
    growth: int = 0
    superseded: bool = False
    pins: int = 0


class EvictionPolicy(ABC):
    """The evictable blocks of one pool, in the order in which they would be given up."""

    def growth(self, names: Sequence[bytes], prompt: int, found: int) -> int:
        """Blocks that a request added to a sequence, of which the policy may learn; called when it ends, once.

        names: of its whole blocks, the first `prompt` of them of its prompt and the first `found` of them not computed
        by it.
        """
        return len(names) - found

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

    The odds that a sequence comes back fall about with the square root of what its last request added to it (a long new
    document is seldom asked about twice, a chat that grew by a line goes on), and by e in every mean time after which
    sequences came back. So a block that was left by a growth of `g` counts as ln(1 + g) / 2 of these times older than
    it is. Both are seen as requests come and go: where prompts ended is remembered longer than their blocks are kept.

    Superseded blocks go first, pinned blocks last. Blocks left by one request go from the deepest on, so that what is
    left is a prefix. Time counts blocks that became evictable, so that an idle cache does not age. Every operation
    takes about constant time: there is a queue for each power of two of growth.
    """

    MAX_ENDS = 1 << 14
    """Ends of prompts that are remembered."""
    MAX_RETURNS = 256
    """Returns over which the time until a sequence comes back is averaged."""

    def __init__(self) -> None:
        self._clock = 0
        self._superseded: dict[Block, int] = {}
        self._pinned: dict[Block, int] = {}
        self._others: dict[int, dict[Block, int]] = {}
        self._queues: dict[Block, dict[Block, int]] = {}
        self._ends: dict[bytes, int] = {}
        self._num_returns = 0
        self._return_time = 0.0

    def growth(self, names: Sequence[bytes], prompt: int, found: int) -> int:
        known = next((count for count in range(prompt, 0, -1) if names[count - 1] in self._ends), 0)
        if known:
            time = self._clock - self._ends.pop(names[known - 1])
            self._num_returns = min(self._num_returns + 1, self.MAX_RETURNS)
            self._return_time += (time - self._return_time) / self._num_returns
        if prompt:
            self._ends[names[prompt - 1]] = self._clock
            if len(self._ends) > self.MAX_ENDS:
                del self._ends[next(iter(self._ends))]
        return len(names) - max(known, found)

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
        block = next(iter(self._superseded or self._least_valuable() or self._pinned))
        self.remove(block)
        return block

    def _queue_for(self, block: Block) -> dict[Block, int]:
        if block.pins:
            return self._pinned
        if block.superseded:
            return self._superseded
        return self._others.setdefault(_doublings(block), {})

    def _least_valuable(self) -> dict[Block, int]:
        """The queue whose first block is to go, an empty one if there are no others than superseded and pinned."""
        queues = [queue for queue in self._others.values() if queue]
        return min(queues, key=lambda queue: self._since(next(iter(queue))), default={})

    def _since(self, block: Block) -> float:
        """When the block became evictable, or would have with a growth of 0 to be worth as much."""
        return self._queues[block][block] - self._return_time * _doublings(block) * log(2) / 2

    def __len__(self) -> int:
        return len(self._queues)

    def __iter__(self) -> Iterator[Block]:
        return chain(self._superseded, merge(*self._others.values(), key=self._since), self._pinned)


def _doublings(block: Block) -> int:
    return round(log2(1 + block.growth))


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"value": LeastValuable, "lru": LeastRecentlyUsed}
"""By name, the default first."""


def make_policy(name: str) -> EvictionPolicy:
    """A new policy; raises ConfigError for an unknown name."""
    if name not in POLICIES:
        raise ConfigError(f"Eviction policy {name!r} is unknown; choose one of {', '.join(POLICIES)}.")
    return POLICIES[name]()

"""Which cached page to give up: a policy orders the named pages that nobody holds."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(eq=False)
class Block:
    """A page whose content has a name.

    depth: block number in its sequence, 0 for the first.
    hits: times a request found it instead of computing it.
    """

    name: bytes
    page: int
    depth: int
    hits: int = 0


class EvictionPolicy(ABC):
    """The evictable blocks of one pool, in the order in which they would be given up."""

    @abstractmethod
    def insert(self, block: Block) -> None:
        """`block` is no longer held by any request."""

    @abstractmethod
    def remove(self, block: Block) -> None:
        """`block` is held again, or forgotten."""

    @abstractmethod
    def evict(self) -> Block:
        """Remove and return the block worth least. There is at least one."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Block]: ...


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

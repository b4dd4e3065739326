"""Blocks in host memory."""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from trillion_infer.cache.tiers.base import (
    UNITS_PER_GROUP,
    BlockKey,
    StoredBlock,
    Tier,
    digest_of,
    group_of,
    unit_of,
)


class HostTier(Tier):
    """Least recently used blocks leave first, with all their parts. The budget counts block bytes."""

    name = "host"
    is_parallel = True
    is_instant = True

    def __init__(self, fingerprint: bytes, budget: int):
        super().__init__(fingerprint, budget)
        self._blocks: OrderedDict[BlockKey, StoredBlock] = OrderedDict()
        self._used = 0
        self._lock = threading.Lock()

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._blocks

    @property
    def used(self) -> int:
        return self._used

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    def put(self, blocks: Sequence[StoredBlock]) -> list[StoredBlock]:
        """A block larger than the whole budget is handed on at once."""
        left = []
        with self._lock:
            for block in blocks:
                if len(block.data) > self.budget:
                    left.append(block)
                    continue
                if block.key in self._blocks:
                    self._blocks.move_to_end(block.key)
                    continue
                while self._used + len(block.data) > self.budget:
                    given_up = self._pop_oldest()
                    left += given_up
                    self.figures.evictions += len(given_up)
                self._blocks[block.key] = block
                self._used += len(block.data)
                self.figures.stored += 1
        return left

    def get(self, key: BlockKey) -> bytes | None:
        block = self._blocks.get(key)
        if block is None:
            return None
        intact = digest_of(self.fingerprint, key, block.data) == block.digest
        with self._lock:
            if not intact:
                self.figures.digest_failures += 1
                if self._blocks.pop(key, None) is not None:
                    self._used -= len(block.data)
                return None
            self.figures.hits += 1
            if key in self._blocks:
                self._blocks.move_to_end(key)
        return block.data

    def discard(self, keys: Sequence[BlockKey]) -> None:
        with self._lock:
            for key in keys:
                block = self._blocks.pop(key, None)
                if block is not None:
                    self._used -= len(block.data)
                    self.figures.deleted += 1

    def delete_tenant(self, tag: bytes) -> None:
        with self._lock:
            keys = [key for key in self._blocks if key[1].startswith(tag)]
        self.discard(keys)

    def drain(self) -> Iterable[StoredBlock]:
        while self._blocks:
            with self._lock:
                parts = self._pop_oldest()
            yield from parts

    def _pop_oldest(self) -> list[StoredBlock]:
        """The part that was not used for longest, and the others of its block: without it they are of no use."""
        unit, name = next(iter(self._blocks))
        units = (unit_of(group_of(unit), part) for part in range(UNITS_PER_GROUP))
        parts = [block for each in units if (block := self._blocks.pop((each, name), None)) is not None]
        self._used -= sum(len(block.data) for block in parts)
        return parts

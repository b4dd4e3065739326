"""Which prompt prefixes a worker has probably cached, least recently used out first."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class PrefixIndex:
    """At most `capacity` block hashes that one worker has seen."""

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def match(self, hashes: Sequence[bytes]) -> int:
        """Number of leading blocks seen before."""
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if hashes[middle - 1] in self._seen else (low, middle - 1)
        return low

    def add(self, hashes: Sequence[bytes]) -> None:
        """Remembers a prompt. Its first blocks are the freshest, so that a chain is forgotten from its end."""
        for block in reversed(hashes):
            self._seen[block] = None
            self._seen.move_to_end(block)
        while len(self._seen) > self._capacity:
            self._seen.popitem(last=False)

    def remove(self, hashes: Iterable[bytes]) -> None:
        """Forgets blocks that the worker has given up."""
        for block in hashes:
            self._seen.pop(block, None)

    def clear(self) -> None:
        """Forgets everything, as the worker did when it went down."""
        self._seen.clear()

"""Which prompt prefixes a worker has probably cached: chained hashes of byte blocks, least recently used out first."""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

BLOCK_BYTES = 512


def prefix_hashes(prompt: bytes, salt: bytes = b"") -> list[bytes]:
    """A 16-byte hash for each whole block of `prompt`, chained: hash i stands for everything up to block i's end."""
    hashes, last = [], hashlib.blake2b(salt, digest_size=16).digest()
    view = memoryview(prompt)
    for start in range(0, len(prompt) - BLOCK_BYTES + 1, BLOCK_BYTES):
        block = hashlib.blake2b(last, digest_size=16)
        block.update(view[start : start + BLOCK_BYTES])
        last = block.digest()
        hashes.append(last)
    return hashes


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

    def clear(self) -> None:
        """Forgets everything, as the worker did when it went down."""
        self._seen.clear()

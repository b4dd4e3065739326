"""What stores that other processes use too have in common: what is known to be there, and being down for a while."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from trillion_infer.cache.tiers.base import BlockKey, Tier


class SharedTier(Tier):
    """A store behind a network or a file system. `used` and `num_blocks` count what this process knows of.

    known_limit: names this process remembers at most, the oldest forgotten first; None: all.
    """

    name = "store"
    is_shared = True
    known_limit: int | None = None

    def __init__(self, fingerprint: bytes, budget: int, clock: Callable[[], float] = time.monotonic):
        super().__init__(fingerprint, budget)
        self._clock = clock
        self._down_until = -float("inf")
        self._known: OrderedDict[BlockKey, int] = OrderedDict()
        self._used = 0
        self._lock = threading.Lock()

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._known

    @property
    def used(self) -> int:
        return self._used

    @property
    def num_blocks(self) -> int:
        return len(self._known)

    @property
    def is_down(self) -> bool:
        """It failed a short while ago."""
        return self._clock() < self._down_until

    def get(self, key: BlockKey) -> bytes | None:
        return self.get_many([key])[0]

    def _learn(self, key: BlockKey, size: int) -> None:
        with self._lock:
            if key not in self._known:
                self._used += size
            self._known[key] = size
            while self.known_limit is not None and len(self._known) > self.known_limit:
                self._used -= self._known.popitem(last=False)[1]

    def _forget(self, key: BlockKey) -> None:
        with self._lock:
            self._used -= self._known.pop(key, 0)

    def _forget_tenant(self, tag: bytes) -> None:
        for key in [key for key in list(self._known) if key[1].startswith(tag)]:
            self._forget(key)

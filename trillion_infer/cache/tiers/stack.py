"""The tiers of one engine, fastest first, and the thread that fills them."""

import logging
import queue
import threading
from collections.abc import Callable, Sequence

from trillion_infer.cache.tiers.base import BlockKey, StoredBlock, Tier, digest_of

IN_FLIGHT_LIMIT = 1 << 28
"""Bytes that may wait to be stored; a block evicted beyond is lost, and counted."""

_log = logging.getLogger(__name__)

Reader = Callable[[], Sequence[bytes]]


class TierStack:
    """Blocks go to the first tier in the background; what a tier gives up goes to the next one.

    tiers: at least one, all for the same model and layout. One thread submits and reads; the stack's own thread
    stores.
    """

    def __init__(self, tiers: Sequence[Tier]):
        self.tiers = list(tiers)
        self._fingerprint = self.tiers[0].fingerprint
        self._arriving: dict[BlockKey, threading.Event] = {}
        self._in_flight = 0
        self._dropped = 0
        self._lock = threading.Lock()
        self._jobs: queue.Queue[tuple[list[BlockKey], Reader, int, threading.Event] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="kv-tiers", daemon=True)
        self._thread.start()

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._arriving or any(key in tier for tier in self.tiers)

    def is_at_hand(self, key: BlockKey) -> bool:
        """The block is in the first tier or on its way there, so that it need not be stored again."""
        return key in self._arriving or key in self.tiers[0]

    def refresh(self) -> None:
        """Learn of blocks that other processes stored."""
        for tier in self.tiers:
            tier.refresh()

    def can_take(self, num_bytes: int) -> bool:
        return self._in_flight + num_bytes <= IN_FLIGHT_LIMIT

    def drop(self, count: int) -> None:
        """Count blocks that were not submitted because too much is in flight."""
        self._dropped += count

    def submit(self, keys: Sequence[BlockKey], read: Reader, num_bytes: int) -> None:
        """Store blocks whose bytes `read` gives, in the order of `keys`; it is called in the background, once."""
        done = threading.Event()
        for key in keys:
            self._arriving[key] = done
        with self._lock:
            self._in_flight += num_bytes
        self._jobs.put((list(keys), read, num_bytes, done))

    def get(self, key: BlockKey) -> tuple[bytes, Tier] | None:
        """A block's bytes, intact, and the tier that had them; None if no tier has. Waits for one that is arriving."""
        arriving = self._arriving.get(key)
        if arriving is not None:
            arriving.wait()
        for tier in self.tiers:
            data = tier.get(key)
            if data is not None:
                return data, tier
        return None

    def flush(self) -> None:
        """Returns when all that was submitted is stored."""
        self._jobs.join()

    def close(self) -> None:
        """Stores what is in flight, and what would end with the process in a tier that outlives it."""
        self._jobs.put(None)
        self._thread.join()
        for above, below in zip(self.tiers, self.tiers[1:], strict=False):
            batch: list[StoredBlock] = []
            for block in above.drain():
                batch.append(block)
                if len(batch) == 64:
                    below.put(batch)
                    batch = []
            below.put(batch)

    def stats(self) -> dict[str, int]:
        """Figures of each tier as `kv_<tier>.<figure>`."""
        figures = {f"kv_{tier.name}.{name}": value for tier in self.tiers for name, value in tier.stats().items()}
        return {**figures, "kv_dropped": self._dropped}

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            keys, read, num_bytes, done = job
            try:
                self._store(keys, read())
            except Exception:
                self._dropped += len(keys)
                _log.exception("KV tiers: %d blocks could not be stored", len(keys))
            finally:
                for key in keys:
                    if self._arriving.get(key) is done:
                        del self._arriving[key]
                with self._lock:
                    self._in_flight -= num_bytes
                done.set()
                self._jobs.task_done()
        self._jobs.task_done()

    def _store(self, keys: Sequence[BlockKey], contents: Sequence[bytes]) -> None:
        blocks = [
            StoredBlock(key, data, digest_of(self._fingerprint, key, data))
            for key, data in zip(keys, contents, strict=True)
        ]
        for tier in self.tiers:
            if not blocks:
                return
            blocks = tier.put(blocks)

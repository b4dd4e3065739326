"""The tiers of one engine, fastest first, and the thread that fills them."""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from trillion_infer.cache.tiers.base import BlockKey, StoredBlock, Tier, digest_of

IN_FLIGHT_LIMIT = 1 << 28
"""Bytes that may wait to be stored; a block evicted beyond is lost, and counted."""

PERSIST_BATCH = 64
MAX_READERS = 8
"""Threads that read blocks and check their digests: one core digests less than a disk or memory gives."""
NEW_SHARE = 0.3
"""Weight of the newest measurement of a tier's speed."""

_log = logging.getLogger(__name__)

Reader = Callable[[], Sequence[bytes]]


@dataclass(frozen=True)
class _Job:
    keys: list[BlockKey]
    read: Reader
    num_bytes: int
    only_shared: bool
    done: threading.Event


class TierStack:
    """Blocks go to the first tier and to those that are shared, in the background; what a tier gives up goes to the
    next one.

    tiers: at least one, all for the same model and layout. One thread submits, one reads (they may be the same); the
    stack's own thread stores.
    """

    def __init__(self, tiers: Sequence[Tier]):
        self.tiers = list(tiers)
        self._fingerprint = self.tiers[0].fingerprint
        self._arriving: dict[BlockKey, threading.Event] = {}
        self._moving: dict[BlockKey, threading.Event] = {}  # given up by a tier, not yet in the next one
        self._in_flight = 0
        self._dropped = 0
        self._seconds_per_byte: dict[str, float] = {}
        self._lock = threading.Lock()
        self._readers = ThreadPoolExecutor(min(MAX_READERS, os.cpu_count() or 1), "kv-read")
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="kv-tiers", daemon=True)
        self._thread.start()

    def __contains__(self, key: BlockKey) -> bool:
        return self._coming(key) is not None or any(key in tier for tier in self.tiers)

    def _coming(self, key: BlockKey) -> threading.Event | None:
        """What is set once a block on its way is stored; None for others."""
        return self._arriving.get(key) or self._moving.get(key)

    def is_at_hand(self, key: BlockKey) -> bool:
        """The block is in the first tier or on its way there, so that it need not be stored again."""
        return key in self._arriving or key in self.tiers[0]

    @property
    def is_shared(self) -> bool:
        """Some tier wants every block as soon as it is computed."""
        return any(tier.is_shared for tier in self.tiers)

    @property
    def is_instant(self) -> bool:
        """`locate` asks nobody outside this process."""
        return all(tier.is_instant for tier in self.tiers)

    def can_take(self, num_bytes: int) -> bool:
        return self._in_flight + num_bytes <= IN_FLIGHT_LIMIT

    def drop(self, count: int) -> None:
        """Count blocks that were not submitted because too much is in flight."""
        self._dropped += count

    def submit(self, keys: Sequence[BlockKey], read: Reader, num_bytes: int, only_shared: bool = False) -> None:
        """Store blocks whose bytes `read` gives, in the order of `keys`; it is called in the background, once.

        only_shared: leave the other tiers out.
        """
        done = threading.Event()
        for key in keys:
            self._arriving[key] = done
        with self._lock:
            self._in_flight += num_bytes
        self._jobs.put(_Job(list(keys), read, num_bytes, only_shared, done))

    def locate(self, keys: Sequence[BlockKey]) -> dict[BlockKey, Tier]:
        """The first tier that has each key, or will have it shortly; keys that none has are left out."""
        found = {key: self.tiers[0] for key in keys if self._coming(key)}
        for tier in self.tiers:
            left = [key for key in keys if key not in found]
            if left:
                found |= dict.fromkeys(tier.lookup(left), tier)
        # What one tier gave up while it was asked, and the next one had not got when it was.
        return found | {key: self.tiers[0] for key in keys if key not in found and self._coming(key)}

    def read(self, keys: Sequence[BlockKey], found: dict[BlockKey, Tier]) -> list[tuple[bytes, Tier] | None]:
        """Intact bytes of located blocks with the tier that had them, None for those that were lost.

        Waits for blocks that are arriving. A block that moved on since it was located is looked for further down.
        """
        for key in keys:
            coming = self._coming(key)
            if coming is not None:
                coming.wait()
        contents: dict[BlockKey, tuple[bytes, Tier]] = {}
        for tier in self.tiers:
            wanted = [key for key in keys if key not in contents and (found.get(key) is tier or key in tier)]
            if wanted:
                contents |= self._read_from(tier, wanted)
        return [contents.get(key) for key in keys]

    def _read_from(self, tier: Tier, keys: Sequence[BlockKey]) -> dict[BlockKey, tuple[bytes, Tier]]:
        begun = time.perf_counter()
        contents = list(self._readers.map(tier.get, keys)) if tier.is_parallel else tier.get_many(keys)
        seconds, size = time.perf_counter() - begun, sum(len(data) for data in contents if data is not None)
        if size:
            old = self._seconds_per_byte.get(tier.name, seconds / size)
            self._seconds_per_byte[tier.name] = (1 - NEW_SHARE) * old + NEW_SHARE * seconds / size
        return {key: (data, tier) for key, data in zip(keys, contents, strict=True) if data is not None}

    def seconds_per_byte(self, tier: Tier) -> float | None:
        """What reading from a tier has taken, latency included; None before the first read."""
        return self._seconds_per_byte.get(tier.name)

    def persist(self, keys: Sequence[BlockKey]) -> None:
        """Copy blocks to the first tier that outlives the process, if there is one."""
        durable = next((tier for tier in self.tiers if tier.is_durable), None)
        self.flush()
        if durable is None:
            return
        for start in range(0, len(keys), PERSIST_BATCH):
            part = [key for key in keys[start : start + PERSIST_BATCH] if key not in durable]
            found = self.read(part, self.locate(part))
            blocks = [(key, each[0]) for key, each in zip(part, found, strict=True) if each is not None]
            durable.put([StoredBlock(key, data, digest_of(self._fingerprint, key, data)) for key, data in blocks])

    def discard(self, keys: Sequence[BlockKey]) -> None:
        """Delete blocks in every tier."""
        self.flush()
        for tier in self.tiers:
            tier.discard(keys)

    def delete_tenant(self, tag: bytes) -> None:
        """Delete a tenant's blocks in every tier."""
        self.flush()
        for tier in self.tiers:
            tier.delete_tenant(tag)

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
        self._readers.shutdown()
        for tier in self.tiers:
            tier.close()

    def stats(self) -> dict[str, int]:
        """Figures of each tier as `kv_<tier>.<figure>`, `read_kb_s` among them; blocks dropped, bytes in flight."""
        figures = {f"kv_{tier.name}.{name}": value for tier in self.tiers for name, value in tier.stats().items()}
        speeds = {f"kv_{name}.read_kb_s": round(1e-3 / max(s, 1e-12)) for name, s in self._seconds_per_byte.items()}
        return {**figures, **speeds, "kv_dropped": self._dropped, "kv_in_flight_bytes": self._in_flight}

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._store(job, job.read())
            except Exception:
                self._dropped += len(job.keys)
                _log.exception("KV tiers: %d blocks could not be stored", len(job.keys))
            finally:
                for key in job.keys:
                    if self._arriving.get(key) is job.done:
                        del self._arriving[key]
                self._moving.clear()
                with self._lock:
                    self._in_flight -= job.num_bytes
                job.done.set()
                self._jobs.task_done()
        self._jobs.task_done()

    def _store(self, job: _Job, contents: Sequence[bytes]) -> None:
        blocks = [
            StoredBlock(key, data, digest_of(self._fingerprint, key, data))
            for key, data in zip(job.keys, contents, strict=True)
        ]
        spilled: Sequence[StoredBlock] = [] if job.only_shared else blocks
        for tier in self.tiers:
            if tier.is_shared and spilled is not blocks:
                spilled = [*blocks, *spilled]
            if spilled:
                spilled = tier.put(spilled)
                self._moving |= {block.key: job.done for block in spilled}

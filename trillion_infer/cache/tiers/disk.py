"""Blocks in files of a folder, which processes may share and which outlives them."""

import logging
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

from trillion_infer.cache.tiers.base import BlockKey, StoredBlock, Tier, digest_of
from trillion_infer.cache.tiers.segment import (
    SUFFIX,
    BrokenSegmentError,
    Extent,
    ForeignSegmentError,
    file_bytes,
    read_block,
    read_index,
    remove_abandoned,
    write_segment,
)
from trillion_infer.core.errors import ConfigError

PARTS_PER_FILE = 64
RETRY_SECONDS = 30.0
"""How long nothing is written after writing failed."""

_log = logging.getLogger(__name__)


class DiskTier(Tier):
    """Least recently used files leave first. The budget counts whole files, those of other processes included.

    Files of each model and layout stand in a folder of their own below `folder`. The index is rebuilt from the files:
    at the start, and by `refresh` at most every `refresh_seconds`. When writing fails the tier still reads, and is
    written to again after RETRY_SECONDS.

    Raises ConfigError if the folder cannot be made or written.
    """

    name = "disk"
    is_parallel = True
    is_durable = True

    def __init__(
        self,
        folder: Path,
        fingerprint: bytes,
        budget: int,
        clock: Callable[[], float] = time.monotonic,
        refresh_seconds: float = 1.0,
    ):
        super().__init__(fingerprint, budget)
        self.folder = folder / fingerprint.hex()[:16]
        self._clock, self._refresh_seconds = clock, refresh_seconds
        self._where: dict[BlockKey, tuple[str, Extent]] = {}
        self._files: OrderedDict[str, tuple[int, tuple[Extent, ...]]] = OrderedDict()
        self._ignored: set[str] = set()
        self._used = 0
        self._down_until = self._scanned = -float("inf")
        self._lock = threading.RLock()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / f"{uuid.uuid4().hex}.probe"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"disk_kv folder {str(folder)!r} cannot be written ({error.strerror}); name a writable folder."
            ) from error
        remove_abandoned(self.folder)
        self._scan()
        self._make_room(0)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._where

    @property
    def used(self) -> int:
        return self._used

    @property
    def num_blocks(self) -> int:
        return len(self._where)

    @property
    def is_down(self) -> bool:
        """Writing failed a short while ago."""
        return self._clock() < self._down_until

    # Writing

    def put(self, blocks: Sequence[StoredBlock]) -> list[StoredBlock]:
        self.refresh()
        new = list({block.key: block for block in blocks if block.key not in self}.values())
        while new:
            count = 1
            while count < min(len(new), PARTS_PER_FILE) and self._fits(new[: count + 1]):
                count += 1
            self._store(new[:count])
            del new[:count]
        return []

    def _fits(self, blocks: Sequence[StoredBlock]) -> bool:
        """A file takes at most a quarter of the budget, so that no eviction empties the tier."""
        return file_bytes([len(block.data) for block in blocks]) <= self.budget // 4

    def _store(self, blocks: Sequence[StoredBlock]) -> None:
        size = file_bytes([len(block.data) for block in blocks])
        if self.is_down or size > self.budget:
            self.figures.refused += len(blocks)
            return
        self._make_room(size)
        name = uuid.uuid4().hex
        try:
            extents = write_segment(self.folder, name, self.fingerprint, blocks)
        except OSError as error:
            self._down_until = self._clock() + RETRY_SECONDS
            self.figures.write_failures += 1
            self.figures.outages += 1
            self.figures.refused += len(blocks)
            _log.warning("KV tier disk: writing to %s failed (%s); next try in %d s", self.folder, error, RETRY_SECONDS)
            return
        self._list(name, size, extents)
        self.figures.stored += len(blocks)

    def _make_room(self, size: int) -> None:
        while self._files and self._used + size > self.budget:
            with self._lock:
                name = next(iter(self._files))
                self.figures.evictions += self._unlist(name)
            self._remove(name)

    # Reading

    def get(self, key: BlockKey) -> bytes | None:
        place = self._where.get(key)
        if place is None:
            return None
        name, extent = place
        try:
            data = read_block(self.folder / f"{name}{SUFFIX}", extent)
        except OSError:
            data = b""
        intact = len(data) == extent.length and digest_of(self.fingerprint, key, data) == extent.digest
        with self._lock:
            if intact:
                self.figures.hits += 1
                if name in self._files:
                    self._files.move_to_end(name)
                return data
            if self._where.get(key) != place:
                return None  # the file was given up while it was read
            if len(data) == extent.length:
                self.figures.digest_failures += 1
            else:
                self.figures.misses += 1
            del self._where[key]
        _log.warning("KV tier disk: a block of %s is not what was stored; it is computed again", name)
        return None

    # Deleting

    def discard(self, keys: Sequence[BlockKey]) -> None:
        """Files that hold other blocks, too, are written anew without these."""
        self._delete({name for key in keys if (name := self._where.get(key, ("",))[0])}, set(keys).__contains__)

    def delete_tenant(self, tag: bytes) -> None:
        self._scan()
        names = {name for key, (name, _) in list(self._where.items()) if key[1].startswith(tag)}
        self._delete(names, lambda key: key[1].startswith(tag))

    def _delete(self, names: set[str], unwanted: Callable[[BlockKey], bool]) -> None:
        for name in names:
            extents = self._files.get(name, (0, ()))[1]
            others = [extent for extent in extents if not unwanted(extent.key)]
            kept = [StoredBlock(e.key, data, e.digest) for e in others if (data := self.get(e.key)) is not None]
            with self._lock:
                self._unlist(name)
                self.figures.deleted += len(extents) - len(others)
            self._remove(name)
            self.put(kept)

    # Index

    def refresh(self) -> None:
        if self._clock() - self._scanned >= self._refresh_seconds:
            self._scan()

    def _scan(self) -> None:
        """Learn of files that came, oldest first, and forget those that are gone."""
        self._scanned = self._clock()
        found: list[tuple[int, str, int]] = []
        with self._lock:
            before = set(self._files)
        try:
            for path in self.folder.glob(f"*{SUFFIX}"):
                try:
                    status = path.stat()
                except OSError:
                    continue
                found.append((status.st_mtime_ns, path.stem, status.st_size))
        except OSError:
            return
        names = {name for _, name, _ in found}
        with self._lock:
            for name in before - names:
                self._unlist(name)
        for _, name, size in sorted(found):
            if name not in self._files and name not in self._ignored:
                self._admit(name, size)

    def _admit(self, name: str, size: int) -> None:
        try:
            extents = read_index(self.folder / f"{name}{SUFFIX}", self.fingerprint)
        except ForeignSegmentError:
            self.figures.foreign += 1
            self._ignored.add(name)
        except BrokenSegmentError:
            self.figures.misses += 1
            self._remove(name)
        except OSError:
            return
        else:
            self._list(name, size, extents)

    def _list(self, name: str, size: int, extents: tuple[Extent, ...]) -> None:
        with self._lock:
            if name in self._files:
                return
            self._files[name] = (size, extents)
            self._used += size
            for extent in extents:
                self._where[extent.key] = (name, extent)

    def _unlist(self, name: str) -> int:
        """Forget a file; the number of blocks that are lost with it."""
        size, extents = self._files.pop(name, (0, ()))
        self._used -= size
        lost = [extent.key for extent in extents if self._where.get(extent.key, ("",))[0] == name]
        for key in lost:
            del self._where[key]
        return len(lost)

    def _remove(self, name: str) -> None:
        try:
            (self.folder / f"{name}{SUFFIX}").unlink(missing_ok=True)
        except OSError as error:
            _log.warning("KV tier disk: %s cannot be removed (%s)", name, error)

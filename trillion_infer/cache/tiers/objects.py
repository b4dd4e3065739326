"""Blocks as objects below a URL: a shared folder, S3, or whatever fsspec knows."""

import importlib
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from trillion_infer.cache.naming import TAG_BYTES
from trillion_infer.cache.tiers.base import BlockKey, StoredBlock, digest_of
from trillion_infer.cache.tiers.shared import SharedTier
from trillion_infer.config.tiers import ObjectStore
from trillion_infer.core.errors import ConfigError

RETRY_SECONDS = 15.0
"""How long a store that failed is left alone."""
TRIM_BYTES = 1 << 26
"""Bytes this process writes between two looks at the whole store's size; less for small budgets."""

LIST_SECONDS = 2.0
"""How old what is known of a folder may be before it is listed again."""
PARTIAL = ".part"

_DIGEST = 32

_log = logging.getLogger(__name__)


class ObjectTier(SharedTier):
    """One object a block, `MODEL/TENANT/GROUP-NAME`: its digest, then its bytes.

    On a local file system an object is written under another name and renamed; object stores publish whole objects.
    With a budget, the oldest objects are removed, whoever wrote them.

    Raises ConfigError when nothing can be written below the URL, or fsspec lacks what the URL needs.
    """

    is_durable = True

    def __init__(
        self,
        spec: ObjectStore,
        fingerprint: bytes,
        clock: Callable[[], float] = time.monotonic,
        list_seconds: float = LIST_SECONDS,
    ):
        super().__init__(fingerprint, spec.num_bytes, clock)
        self._list_seconds = list_seconds
        self._listed: dict[bytes, float] = {}
        self._untrimmed = 0
        try:
            self._files, root = importlib.import_module("fsspec").core.url_to_fs(spec.url)
            self._root = f"{root.rstrip('/')}/{fingerprint.hex()[:16]}"
            self._is_local = "file" in _protocols(self._files)
            self._files.makedirs(self._root, exist_ok=True)
            probe = f"{self._root}/{uuid.uuid4().hex}.probe"
            self._files.pipe_file(probe, b"probe")
            self._files.rm_file(probe)
        except (OSError, ImportError, ValueError) as error:
            raise ConfigError(f"store {spec.url!r} cannot be used ({error}); name one that can be written.") from error

    # Writing

    def put(self, blocks: Sequence[StoredBlock]) -> list[StoredBlock]:
        new = list({block.key: block for block in blocks if block.key not in self}.values())
        if self.is_down:
            self.figures.refused += len(new)
            return []
        objects = {self._path(block.key): block.digest + block.data for block in new}
        try:
            for folder in {path.rpartition("/")[0] for path in objects}:
                self._files.makedirs(folder, exist_ok=True)
            if self._is_local:
                for path, content in objects.items():
                    partial = f"{path}.{uuid.uuid4().hex}{PARTIAL}"
                    self._files.pipe_file(partial, content)
                    self._files.mv(partial, path)
            elif objects:
                self._files.pipe(objects)
        except Exception as error:  # each file system raises errors of its own
            self._fail(error)
            self.figures.write_failures += 1
            self.figures.refused += len(new)
            return []
        for block in new:
            self.figures.stored += 1
            self._learn(block.key, len(block.data))
        self._trim(sum(map(len, objects.values())))
        return []

    def _trim(self, written: int) -> None:
        """Removes the oldest objects beyond the budget."""
        self._untrimmed += written
        if not self.budget or self._untrimmed < min(TRIM_BYTES, self.budget // 8):
            return
        self._untrimmed = 0
        try:
            found = self._files.find(self._root, detail=True)
            total = sum(entry["size"] for entry in found.values())
            for path, entry in sorted(found.items(), key=lambda item: _written(item[1])):
                if total <= self.budget:
                    break
                self._files.rm_file(path)
                total -= entry["size"]
                self.figures.evictions += 1
                self._forget(self._key(path))
        except Exception as error:
            self._fail(error)

    # Reading

    def get_many(self, keys: Sequence[BlockKey]) -> list[bytes | None]:
        if self.is_down or not keys:
            return [None] * len(keys)
        paths = [self._path(key) for key in keys]
        try:
            found = self._files.cat(paths, on_error="return")
        except Exception as error:
            self._fail(error)
            return [None] * len(keys)
        return [self._intact(key, found.get(path)) for key, path in zip(keys, paths, strict=True)]

    def _intact(self, key: BlockKey, content: Any) -> bytes | None:
        if not isinstance(content, bytes):
            self.figures.misses += 1
            self._forget(key)
            if isinstance(content, Exception) and not isinstance(content, FileNotFoundError):
                self._fail(content)
            return None
        digest, data = content[:_DIGEST], content[_DIGEST:]
        if digest_of(self.fingerprint, key, data) == digest:
            self.figures.hits += 1
            self._learn(key, len(data))
            return data
        self.figures.digest_failures += 1
        self._remove([key])
        _log.warning("KV tier store: %s is not what was stored; it is computed again", self._path(key))
        return None

    def lookup(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        if any(key not in self for key in keys) and not self.is_down:
            for tag in {key[1][:TAG_BYTES] for key in keys}:
                self._list(tag)
        return {key for key in keys if key in self}

    def _list(self, tag: bytes) -> None:
        """Learn of a tenant's objects, at most every LIST_SECONDS."""
        if self._clock() - self._listed.get(tag, -float("inf")) < self._list_seconds:
            return
        self._listed[tag] = self._clock()
        folder = f"{self._root}/{tag.hex()}"
        try:
            self._files.invalidate_cache(folder)
            for entry in self._files.ls(folder, detail=True):
                if not entry["name"].endswith(PARTIAL):
                    self._learn(self._key(entry["name"]), max(0, entry["size"] - _DIGEST))
        except FileNotFoundError:
            return
        except Exception as error:
            self._fail(error)

    # Deleting

    def discard(self, keys: Sequence[BlockKey]) -> None:
        self.figures.deleted += self._remove(keys)

    def delete_tenant(self, tag: bytes) -> None:
        folder = f"{self._root}/{tag.hex()}"
        self._forget_tenant(tag)
        try:
            if self._files.exists(folder):
                self.figures.deleted += len(self._files.find(folder))
                self._files.rm(folder, recursive=True)
        except Exception as error:
            self._fail(error)

    def _remove(self, keys: Sequence[BlockKey]) -> int:
        removed = 0
        for key in keys:
            self._forget(key)
            try:
                self._files.rm_file(self._path(key))
                removed += 1
            except FileNotFoundError:
                continue
            except Exception as error:
                self._fail(error)
        return removed

    # Internals

    def _path(self, key: BlockKey) -> str:
        name = key[1].hex()
        return f"{self._root}/{name[: 2 * TAG_BYTES]}/{key[0]}-{name}"

    def _key(self, path: str) -> BlockKey:
        group, _, name = path.rpartition("/")[2].partition("-")
        try:
            return int(group), bytes.fromhex(name)
        except ValueError:
            return 0, b""

    def _fail(self, error: Exception) -> None:
        if not self.is_down:
            self.figures.outages += 1
            _log.warning("KV tier store: %s failed (%s); next try in %g s", self._root, error, RETRY_SECONDS)
        self._down_until = self._clock() + RETRY_SECONDS


def _protocols(files: Any) -> tuple[str, ...]:
    protocol = files.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def _written(entry: dict[str, Any]) -> float:
    """When an object was written, as its file system tells."""
    stamp = entry.get("mtime", entry.get("LastModified", entry.get("created", 0)))
    return stamp.timestamp() if hasattr(stamp, "timestamp") else float(stamp or 0)

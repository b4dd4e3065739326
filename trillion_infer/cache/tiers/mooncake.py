"""Blocks in a Mooncake store: memory of many processes, found through one master."""

import importlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from trillion_infer.cache.tiers.base import BlockKey, StoredBlock, digest_of
from trillion_infer.cache.tiers.shared import SharedTier
from trillion_infer.config.tiers import MooncakeStore
from trillion_infer.core.errors import ConfigError

BATCH = 16
"""Blocks one call moves."""
RETRY_SECONDS = 5.0
"""How long a store that did not answer is left alone."""
FULL_SECONDS = 1.0
"""How long nothing is put into a store that stayed full."""
KNOWN_LIMIT = 1 << 20
"""Names of blocks this process remembers to have stored or seen there."""

_DIGEST = 32
_CONNECT_SECONDS = 3.0
_PUT_PAUSES = (0.0, 0.05, 0.2)
"""Seconds before each try to put blocks: the master makes room in the background when the store is full."""
_RPC_FAILED = -900

_log = logging.getLogger(__name__)


class MooncakeTier(SharedTier):
    """An object a block: its digest, then its bytes, moved straight between registered buffers and the store.

    A put of a name that is there returns success and keeps what is there, so a block that is not intact is removed
    before it is stored again. Objects vanish with the process that lent their memory, by the master's eviction and
    when the master restarts; each is a miss here. After an error of the connection the tier is down for RETRY_SECONDS.

    block_bytes: of the largest block. Raises ConfigError when the master cannot be reached, or the package is missing.
    """

    known_limit = KNOWN_LIMIT

    def __init__(
        self, spec: MooncakeStore, fingerprint: bytes, block_bytes: int, clock: Callable[[], float] = time.monotonic
    ):
        super().__init__(fingerprint, spec.segment, clock)
        self.is_durable = spec.segment == 0
        self._prefix = fingerprint.hex()[:16]
        self._full_until = -float("inf")
        self._client = _connect(spec, 2 * BATCH * (block_bytes + _DIGEST))
        self._outgoing = _Buffer(self._client, block_bytes + _DIGEST)
        self._incoming = _Buffer(self._client, block_bytes + _DIGEST)

    # Writing

    def put(self, blocks: Sequence[StoredBlock]) -> list[StoredBlock]:
        new = list({block.key: block for block in blocks if block.key not in self}.values())
        for start in range(0, len(new), BATCH):
            self._put_batch(new[start : start + BATCH])
        return []

    def _put_batch(self, blocks: Sequence[StoredBlock]) -> None:
        left = list(blocks)
        for pause in _PUT_PAUSES:
            if self.is_down or self._clock() < self._full_until or not left:
                break
            time.sleep(pause)
            with self._outgoing.slots([_DIGEST + len(block.data) for block in left]) as (places, sizes):
                for i, block in enumerate(left):
                    self._outgoing.fill(i, block.digest, block.data)
                codes = self._client.batch_put_from([self._name(b.key) for b in left], places, sizes)
            self._watch(codes)
            for block, code in zip(left, codes, strict=True):
                if code == 0:
                    self.figures.stored += 1
                    self._learn(block.key, len(block.data))
            left = [block for block, code in zip(left, codes, strict=True) if code != 0]
        if left:
            self.figures.refused += len(left)
            if not self.is_down:
                self._full_until = self._clock() + FULL_SECONDS

    # Reading

    def get_many(self, keys: Sequence[BlockKey]) -> list[bytes | None]:
        found: list[bytes | None] = []
        for start in range(0, len(keys), BATCH):
            found += self._get_batch(keys[start : start + BATCH])
        return found

    def _get_batch(self, keys: Sequence[BlockKey]) -> list[bytes | None]:
        if self.is_down:
            return [None] * len(keys)
        with self._incoming.slots([self._incoming.slot] * len(keys)) as (places, sizes):
            lengths = self._client.batch_get_into([self._name(key) for key in keys], places, sizes)
            contents = [self._incoming.read(i, max(0, length)) for i, length in enumerate(lengths)]
        self._watch(lengths)
        return [self._intact(key, *content) for key, content in zip(keys, contents, strict=True)]

    def _intact(self, key: BlockKey, digest: bytes, data: bytes) -> bytes | None:
        if digest and digest_of(self.fingerprint, key, data) == digest:
            self.figures.hits += 1
            self._learn(key, len(data))
            return data
        self._forget(key)
        if digest:
            self.figures.digest_failures += 1
            self._client.remove(self._name(key), True)
            _log.warning("KV tier store: a block is not what was stored; it is computed again")
        else:
            self.figures.misses += 1
        return None

    def lookup(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        if self.is_down or not keys:
            return set()
        codes = self._client.batch_is_exist([self._name(key) for key in keys])
        self._watch(codes)
        found = {key for key, code in zip(keys, codes, strict=True) if code == 1}
        for key in keys:
            if key not in found:
                self._forget(key)
        return found

    # Deleting

    def discard(self, keys: Sequence[BlockKey]) -> None:
        if not keys or self.is_down:
            return
        codes = self._client.batch_remove([self._name(key) for key in keys], True)
        self._watch(codes)
        self.figures.deleted += sum(code == 0 for code in codes)
        for key in keys:
            self._forget(key)

    def delete_tenant(self, tag: bytes) -> None:
        removed = self._client.remove_by_regex(f"^{self._prefix}-[0-9]+-{tag.hex()}", True)
        self._watch([min(removed, 0)])
        self.figures.deleted += max(removed, 0)
        self._forget_tenant(tag)

    def close(self) -> None:
        self._client.close()

    # Internals

    def _name(self, key: BlockKey) -> str:
        return f"{self._prefix}-{key[0]}-{key[1].hex()}"

    def _watch(self, codes: Sequence[int]) -> None:
        """Takes the tier down when a call did not reach the master."""
        if _RPC_FAILED in codes:
            if not self.is_down:
                self.figures.outages += 1
                _log.warning("KV tier store: the master does not answer; next try in %g s", RETRY_SECONDS)
            self._down_until = self._clock() + RETRY_SECONDS


class _Buffer:
    """BATCH slots of memory that the store reads and writes without a copy of its own. One user at a time."""

    def __init__(self, client: Any, slot: int):
        self.slot = slot
        self._memory = np.zeros(BATCH * slot, np.uint8)
        self._lock = threading.Lock()
        if client.register_buffer(self._memory.ctypes.data, self._memory.nbytes) != 0:
            raise ConfigError("The Mooncake store refused to register a buffer; see its log.")

    @contextmanager
    def slots(self, sizes: list[int]) -> Iterator[tuple[list[int], list[int]]]:
        """Addresses of as many slots as there are sizes, held while in the block; the sizes."""
        with self._lock:
            first = self._memory.ctypes.data
            yield [first + i * self.slot for i in range(len(sizes))], sizes

    def fill(self, place: int, *parts: bytes) -> None:
        start = place * self.slot
        for part in parts:
            self._memory[start : start + len(part)] = np.frombuffer(part, np.uint8)
            start += len(part)

    def read(self, place: int, length: int) -> tuple[bytes, bytes]:
        """The digest and the bytes of an object of `length`; nothing where there is none."""
        content = self._memory[place * self.slot : place * self.slot + length]
        return content[:_DIGEST].tobytes(), content[_DIGEST:].tobytes()


def _connect(spec: MooncakeStore, buffer_bytes: int) -> Any:
    """A connected client. The library itself would try for a minute and a half, so the port is asked first."""
    address = f"{spec.master}:{spec.port}"
    try:
        socket.create_connection((spec.master, spec.port), _CONNECT_SECONDS).close()
    except OSError as error:
        raise ConfigError(
            f"store mooncake://{address} cannot be reached ({error.strerror or error}); start mooncake_master there "
            "or leave store out."
        ) from error
    os.environ.setdefault("GLOG_minloglevel", "2")  # the library logs every call otherwise
    os.environ.setdefault("MC_LOG_LEVEL", "WARNING")
    try:
        module = importlib.import_module("mooncake.store")
    except ImportError as error:
        raise ConfigError(
            f"store mooncake:// needs the package mooncake-transfer-engine ({error}); "
            "pip install 'trillion-infer[store]'."
        ) from error
    client = module.MooncakeDistributedStore()
    code = client.setup(
        spec.host, "P2PHANDSHAKE", spec.segment, max(buffer_bytes, 16 << 20), spec.protocol, "", address
    )
    if code != 0:
        raise ConfigError(f"store mooncake://{address} refused this process (code {code}); see its log.")
    return client

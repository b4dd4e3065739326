"""What a tier is: blocks of bytes by key, a digest checked at every return, figures of what happened."""

import hashlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

BlockKey = tuple[int, bytes]
"""(number of the cache group, block name)."""


@dataclass(frozen=True)
class StoredBlock:
    """The bytes of one page of one group on their way to or between tiers. digest: see `digest_of`."""

    key: BlockKey
    data: bytes
    digest: bytes


@dataclass
class TierFigures:
    """Counters since the start, in blocks unless named otherwise.

    misses: blocks that were listed and could not be read (file gone, truncated). digest_failures: read, but not the
    bytes that were stored. foreign: files of another model, layout or format. refused: not stored, because the tier
    was down or writing failed.
    """

    hits: int = 0
    stored: int = 0
    evictions: int = 0
    misses: int = 0
    digest_failures: int = 0
    foreign: int = 0
    refused: int = 0
    write_failures: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def digest_of(fingerprint: bytes, key: BlockKey, data: bytes) -> bytes:
    """BLAKE2b-256 over model and layout, identity and bytes: another block's bytes never pass for this one's."""
    hasher = hashlib.blake2b(fingerprint, digest_size=32)
    hasher.update(struct.pack("<IQ", key[0], len(data)) + key[1])
    hasher.update(data)
    return hasher.digest()


class Tier(ABC):
    """A place for blocks. Safe to use from two threads; nothing here raises for want of space or a broken device."""

    name: str
    is_durable = False
    """Its blocks outlive the process."""

    def __init__(self, fingerprint: bytes, budget: int):
        self.fingerprint = fingerprint
        self.budget = budget
        self.figures = TierFigures()

    @abstractmethod
    def __contains__(self, key: BlockKey) -> bool: ...

    @property
    @abstractmethod
    def used(self) -> int:
        """Bytes taken of the budget."""

    @property
    @abstractmethod
    def num_blocks(self) -> int: ...

    @abstractmethod
    def put(self, blocks: Sequence[StoredBlock]) -> list[StoredBlock]:
        """Store blocks; returns those given up for them that this tier can still hand on."""

    @abstractmethod
    def get(self, key: BlockKey) -> bytes | None:
        """The bytes that were stored under `key`, None (and the key forgotten) if they are not intact."""

    def refresh(self) -> None:  # noqa: B027
        """Learn of blocks that other processes stored."""

    def drain(self) -> Iterable[StoredBlock]:
        """The blocks that end with the process, least recently used first; they leave this tier."""
        return ()

    def stats(self) -> dict[str, int]:
        """Counters, bytes and blocks."""
        return {**self.figures.as_dict(), "bytes": self.used, "blocks": self.num_blocks}

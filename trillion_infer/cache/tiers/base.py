"""What a tier is: blocks of bytes by key, a digest checked at every return, figures of what happened."""

import hashlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

BlockKey = tuple[int, bytes]
"""(unit, block name): a part of a block, which tiers store by itself, see `unit_of`. A name begins with its tenant's
tag, see BlockNamer."""

UNITS_PER_GROUP = 16
"""Parts that a block of a cache group may have at most."""


@dataclass(frozen=True)
class StoredBlock:
    """The bytes of a part of one page on their way to or between tiers. digest: see `digest_of`."""

    key: BlockKey
    data: bytes
    digest: bytes


@dataclass
class TierFigures:
    """Counters since the start, in stored parts of blocks unless named otherwise.

    misses: blocks that were listed and could not be read (file gone, truncated). digest_failures: read, but not the
    bytes that were stored. foreign: files of another model, layout or format. refused: not stored, because the tier
    was down, full or writing failed. outages: times the tier was found down. deleted: on request.
    """

    hits: int = 0
    stored: int = 0
    evictions: int = 0
    misses: int = 0
    digest_failures: int = 0
    foreign: int = 0
    refused: int = 0
    write_failures: int = 0
    outages: int = 0
    deleted: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def unit_of(group: int, part: int) -> int:
    """The number of a part of a cache group's blocks."""
    return group * UNITS_PER_GROUP + part


def group_of(unit: int) -> int:
    """The cache group of a unit."""
    return unit // UNITS_PER_GROUP


def digest_of(fingerprint: bytes, key: BlockKey, data: bytes) -> bytes:
    """SHA-256 over model and layout, identity and bytes: another block's bytes never pass for this one's."""
    hasher = hashlib.sha256(fingerprint)
    hasher.update(struct.pack("<IQ", key[0], len(data)) + key[1])
    hasher.update(data)
    return hasher.digest()


class Tier(ABC):
    """A place for blocks. Safe to use from two threads; nothing here raises for want of space or a broken device."""

    name: str
    is_durable = False
    """Its blocks outlive the process."""
    is_instant = False
    """`lookup` asks nobody outside this process."""
    is_parallel = False
    """Many threads may call `get` at once, and that is faster than `get_many`."""
    is_shared = False
    """Other processes read it as soon as it is written: it gets every block, not only what the tier above gives up."""
    is_down = False
    """It failed a short while ago and is left alone until the next try."""

    def __init__(self, fingerprint: bytes, budget: int):
        self.fingerprint = fingerprint
        self.budget = budget
        self.figures = TierFigures()

    @abstractmethod
    def __contains__(self, key: BlockKey) -> bool:
        """As far as this process knows, at once."""

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

    def get_many(self, keys: Sequence[BlockKey]) -> list[bytes | None]:
        """`get` of each, in as few round trips as the tier can."""
        return [self.get(key) for key in keys]

    def lookup(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """Those that are stored, by whomever. May take a round trip."""
        self.refresh()
        return {key for key in keys if key in self}

    def refresh(self) -> None:  # noqa: B027
        """Learn of blocks that other processes stored."""

    @abstractmethod
    def discard(self, keys: Sequence[BlockKey]) -> None:
        """Delete blocks; those that are not here are skipped."""

    @abstractmethod
    def delete_tenant(self, tag: bytes) -> None:
        """Delete every block whose name begins with `tag`, whoever stored it."""

    def drain(self) -> Iterable[StoredBlock]:
        """The blocks that end with the process, least recently used first; they leave this tier."""
        return ()

    def close(self) -> None:  # noqa: B027
        """Give up connections. The tier is of no use afterwards."""

    def stats(self) -> dict[str, int]:
        """Counters; bytes and blocks as far as this process knows; bytes that may be taken, 0 for no limit."""
        state = {"bytes": self.used, "blocks": self.num_blocks, "budget": self.budget, "is_down": int(self.is_down)}
        return {**self.figures.as_dict(), **state}

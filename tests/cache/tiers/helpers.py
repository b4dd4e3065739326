"""Small blocks whose bytes follow from their keys."""

import hashlib

from trillion_infer.cache.tiers.base import BlockKey, StoredBlock, digest_of, unit_of

MODEL = b"m" * 32
SIZE = 1000


def key_of(number: int, group: int = 0, part: int = 0) -> BlockKey:
    return unit_of(group, part), hashlib.sha256(str(number).encode()).digest()


def bytes_of(key: BlockKey) -> bytes:
    return (key[1] * (SIZE // 32 + 1))[:SIZE]


def block(number: int, group: int = 0, part: int = 0) -> StoredBlock:
    key = key_of(number, group, part)
    return StoredBlock(key, bytes_of(key), digest_of(MODEL, key, bytes_of(key)))


def blocks(*numbers: int) -> list[StoredBlock]:
    return [block(number) for number in numbers]


class Clock:
    """Time that tests set."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

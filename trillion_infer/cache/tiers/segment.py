"""One file of blocks: a header that names them all, then their bytes.

Layout, little-endian: magic, version, number of blocks, model fingerprint; for each block group, name, offset, length
and digest; a digest of all that; then the blocks' bytes. A file is written under a temporary name that is locked while
its writer lives, and published by rename: what has the final name was complete. Nothing is flushed to the device, for a
digest tells a torn file after a power loss.
"""

import fcntl
import hashlib
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trillion_infer.cache.tiers.base import BlockKey, StoredBlock

MAGIC = b"tinferkv"
VERSION = 2
SUFFIX, PARTIAL = ".kv", ".part"

_HEAD = struct.Struct("<8sII32s")
_ENTRY = struct.Struct("<I32sQQ32s")
_DIGEST = 32
MAX_BLOCKS = 4096


class ForeignSegmentError(Exception):
    """The file is of another model, layout or format version."""


class BrokenSegmentError(Exception):
    """The file is not what its writer published."""


@dataclass(frozen=True)
class Extent:
    """Where a block's bytes lie in a file, and their digest."""

    key: BlockKey
    offset: int
    length: int
    digest: bytes


def file_bytes(lengths: Sequence[int]) -> int:
    """Size of a file with blocks of these lengths."""
    return _HEAD.size + len(lengths) * _ENTRY.size + _DIGEST + sum(lengths)


def write_segment(folder: Path, name: str, fingerprint: bytes, blocks: Sequence[StoredBlock]) -> tuple[Extent, ...]:
    """Write and publish `folder/name`.kv. Raises OSError, leaving nothing behind."""
    offset = file_bytes([]) + len(blocks) * _ENTRY.size
    extents, head = [], _HEAD.pack(MAGIC, VERSION, len(blocks), fingerprint)
    for block in blocks:
        extents.append(Extent(block.key, offset, len(block.data), block.digest))
        head += _ENTRY.pack(block.key[0], block.key[1], offset, len(block.data), block.digest)
        offset += len(block.data)
    partial = folder / f"{name}{PARTIAL}"
    try:
        with open(partial, "xb", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            for part in (head + hashlib.sha256(head).digest(), *(b.data for b in blocks)):
                view = memoryview(part)
                while len(view):
                    view = view[file.write(view) :]
            os.rename(partial, folder / f"{name}{SUFFIX}")
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    return tuple(extents)


def read_index(path: Path, fingerprint: bytes) -> tuple[Extent, ...]:
    """The blocks of a published file, their bytes unread.

    Raises ForeignSegmentError, BrokenSegmentError (truncated or changed) and OSError.
    """
    with open(path, "rb") as file:
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            raise BrokenSegmentError
        magic, version, count, owner = _HEAD.unpack(head)
        if magic != MAGIC or version != VERSION or owner != fingerprint:
            raise ForeignSegmentError
        if count > MAX_BLOCKS:
            raise BrokenSegmentError
        head += file.read(count * _ENTRY.size)
        if hashlib.sha256(head).digest() != file.read(_DIGEST):
            raise BrokenSegmentError
        entries = list(_ENTRY.iter_unpack(head[_HEAD.size :]))
        if os.fstat(file.fileno()).st_size != file_bytes([entry[3] for entry in entries]):
            raise BrokenSegmentError
    return tuple(Extent((group, name), offset, length, digest) for group, name, offset, length, digest in entries)


def read_block(path: Path, extent: Extent) -> bytes:
    """The bytes at `extent`, fewer if the file ends early. Raises OSError."""
    with open(path, "rb", buffering=0) as file:
        file.seek(extent.offset)
        parts, left = [], extent.length
        while left and (part := file.read(left)):
            parts.append(part)
            left -= len(part)
    return b"".join(parts)


def remove_abandoned(folder: Path) -> None:
    """Remove the unfinished files of writers that are gone."""
    for path in folder.glob(f"*{PARTIAL}"):
        try:
            with open(path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
        except OSError:
            continue

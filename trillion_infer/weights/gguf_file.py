"""A GGUF file, mapped: its metadata, and where each tensor's packed blocks lie."""

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trillion_infer.core.errors import ModelLoadError
from trillion_infer.weights.gguf_types import GGMLType
from trillion_infer.weights.mapped import MappedFile

_SCALARS = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype(np.bool_),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_STRING, _ARRAY = 8, 9
_U64 = struct.Struct("<Q")


@dataclass(frozen=True)
class GGUFTensor:
    """`shape` is outermost first, as numpy's; the packed blocks are bytes `[begin, end)` of the file."""

    shape: tuple[int, ...]
    qtype: GGMLType
    begin: int
    end: int


class GGUFFile:
    """Metadata (arrays are decoded when asked for) and tensors of a GGUF file of version 2 or 3, little-endian.

    Raises ModelLoadError when the file is not GGUF, is shorter than its header says, or uses an unknown tensor type.
    """

    def __init__(self, path: Path):
        self.path = path
        self.mapped = MappedFile(path)
        head = self.mapped.bytes[:24].tobytes()
        if head[:4] != b"GGUF":
            raise ModelLoadError(f"{path} is not a GGUF file (it begins with {head[:4]!r}); fetch it again")
        if len(head) < 24:
            raise ModelLoadError(
                f"{path} is truncated: it has {len(head)} bytes, a GGUF header has more; fetch it again"
            )
        version, tensors, keys = struct.unpack("<IQQ", head[4:])
        if version not in (2, 3):
            raise ModelLoadError(f"{path} has GGUF version {version}; versions 2 and 3, little-endian, are supported")
        cursor = _Cursor(self.mapped.bytes.data, 24)
        try:
            self.metadata: Mapping[str, Any] = _Metadata({cursor.string(): cursor.value() for _ in range(keys)})
            self.metadata_end = cursor.at
            rows = [_tensor_row(cursor) for _ in range(tensors)]
        except (struct.error, IndexError, OverflowError, UnicodeDecodeError) as error:
            raise ModelLoadError(
                f"{path} is truncated or corrupt: its header breaks off at byte {cursor.at} of {self.mapped.size}; "
                "the download is probably incomplete, fetch it again"
            ) from error
        except ValueError as error:
            raise ModelLoadError(f"{path} has a header that cannot be read: {error}") from error
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelLoadError(f"{path} has general.alignment {alignment!r}; it must be a positive number")
        self.tensors = _place(path, rows, -(-cursor.at // alignment) * alignment, self.mapped.size)

    def raw(self, name: str) -> np.ndarray:
        """Packed blocks of a tensor as a read-only uint8 view, `shape[:-1] + (bytes of a row,)`."""
        t = self.tensors[name]
        return self.mapped.bytes[t.begin : t.end].reshape(*t.shape[:-1], -1)


def write_metadata_only(source: Path, target: Path) -> None:
    """Copies a GGUF without its tensors: tokenizer and chat template in a file of their own."""
    file = GGUFFile(source)
    head = struct.pack("<4sIQQ", b"GGUF", 3, 0, len(file.metadata))
    target.write_bytes(head + file.mapped.bytes[24 : file.metadata_end].tobytes())


class _Cursor:
    """A position in the header. Reading past the end raises struct.error or IndexError."""

    def __init__(self, data: memoryview, at: int):
        self.data, self.at = data, at

    def number(self, kind: int) -> Any:
        dtype = _SCALARS[kind]
        self.at += dtype.itemsize
        if self.at > len(self.data):
            raise IndexError(self.at)
        return np.frombuffer(self.data, dtype, 1, self.at - dtype.itemsize)[0].item()

    def string(self) -> str:
        start = self.at + 8
        self.at = start + _U64.unpack_from(self.data, self.at)[0]
        if self.at > len(self.data):
            raise IndexError(self.at)
        return str(self.data[start : self.at], "utf-8")

    def value(self) -> "_Lazy":
        return self._value(self.number(4))

    def _value(self, kind: int) -> "_Lazy":
        if kind in _SCALARS:
            return _Lazy(value=self.number(kind))
        if kind == _STRING:
            return _Lazy(value=self.string())
        if kind != _ARRAY:
            raise ValueError(f"unknown metadata type {kind}")
        kind, count = self.number(4), self.number(10)
        start = self.at
        if kind in _SCALARS:
            self.at += count * _SCALARS[kind].itemsize
        elif kind == _STRING:
            self._skip_strings(count)
        else:
            return _Lazy(value=[self._value(kind).get() for _ in range(count)])
        if self.at > len(self.data):
            raise IndexError(self.at)
        return _Lazy(self.data, start, kind, count)

    def _skip_strings(self, count: int) -> None:
        at, data, unpack = self.at, self.data, _U64.unpack_from
        for _ in range(count):
            at += 8 + unpack(data, at)[0]
        self.at = at


@dataclass
class _Lazy:
    """A metadata value, or the place of an array that becomes a list on first use."""

    data: memoryview | None = None
    start: int = 0
    kind: int = 0
    count: int = 0
    value: Any = None

    def get(self) -> Any:
        if self.data is not None:
            self.value, self.data = self._decode(self.data), None
        return self.value

    def _decode(self, data: memoryview) -> list:
        if self.kind in _SCALARS:
            return np.frombuffer(data, _SCALARS[self.kind], self.count, self.start).tolist()
        cursor = _Cursor(data, self.start)
        return [cursor.string() for _ in range(self.count)]


class _Metadata(Mapping[str, Any]):
    def __init__(self, values: dict[str, _Lazy]):
        self._values = values

    def __getitem__(self, key: str) -> Any:
        return self._values[key].get()

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _tensor_row(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    shape = tuple(cursor.number(10) for _ in range(cursor.number(4)))[::-1]
    return name, shape, cursor.number(4), cursor.number(10)


def _place(path: Path, rows: list, start: int, size: int) -> dict[str, GGUFTensor]:
    tensors = {}
    for name, shape, kind, offset in sorted(rows, key=lambda row: row[3]):
        try:
            qtype = GGMLType(kind)
        except ValueError as error:
            raise ModelLoadError(f"{path}: tensor {name} has the unknown GGML type {kind}") from error
        block, block_bytes = qtype.block
        if not shape or shape[-1] % block:
            raise ModelLoadError(
                f"{path}: tensor {name} of shape {shape} does not divide into {qtype.name} blocks of {block}"
            )
        begin = start + offset
        tensors[name] = GGUFTensor(shape, qtype, begin, begin + math.prod(shape) // block * block_bytes)
    needed = max((t.end for t in tensors.values()), default=0)
    if needed > size:
        raise ModelLoadError(
            f"{path} is truncated: its header describes {needed} bytes, the file has {size}; "
            "the download is probably incomplete, fetch it again"
        )
    return tensors

"""The key-value header of a GGUF file, read without touching its tensors."""

import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np

from trillion_infer.core.errors import ModelLoadError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


def read_gguf_metadata(path: str | Path) -> dict[str, Any]:
    """All metadata of the GGUF file at `path`: scalars and strings as Python values, number arrays as
    numpy arrays, string arrays as lists. Raises ModelLoadError if the file is not a complete GGUF header."""
    path = Path(path)
    if not path.is_file():
        raise ModelLoadError(f"no GGUF file at {path}; give the path of a file whose name ends in .gguf.")
    with path.open("rb") as file:
        if path.stat().st_size < 24:
            raise ModelLoadError(f"{path} has {path.stat().st_size} bytes, too few for a GGUF header.")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read_header(data, path)


def _read_header(data: mmap.mmap, path: Path) -> dict[str, Any]:
    if data[:4] != b"GGUF":
        raise ModelLoadError(f"{path} does not begin with the GGUF magic; it is not a GGUF file.")
    version = _U32.unpack_from(data, 4)[0]
    if version not in (2, 3):
        raise ModelLoadError(f"{path} is GGUF version {version}; little-endian versions 2 and 3 can be read.")
    count = _U64.unpack_from(data, 16)[0]
    cursor, metadata = _Cursor(data, 24), {}
    try:
        for _ in range(count):
            key = cursor.string()
            metadata[key] = cursor.value(cursor.unpack(_U32))
    except (struct.error, ValueError, UnicodeDecodeError) as error:
        done = len(metadata)
        raise ModelLoadError(
            f"the metadata of {path} ends or breaks after {done} of {count} entries ({error}); "
            "the file is truncated or damaged, download it again."
        ) from error
    return metadata


class _Cursor:
    """A read position in the mapped file; every read checks the file's end."""

    def __init__(self, data: mmap.mmap, offset: int):
        self._data = data
        self._offset = offset

    def unpack(self, layout: struct.Struct) -> Any:
        value = layout.unpack_from(self._data, self._offset)[0]
        self._offset += layout.size
        return value

    def string(self) -> str:
        length = self.unpack(_U64)
        return str(self._take(length), "utf-8")

    def _take(self, length: int) -> bytes:
        end = self._offset + length
        if end > len(self._data):
            raise ValueError(f"{length} bytes wanted at offset {self._offset} of {len(self._data)}")
        piece = self._data[self._offset : end]
        self._offset = end
        return piece

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.unpack(struct.Struct("<" + _SCALARS[kind]))
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"unknown value type {kind}")
        element, length = self.unpack(_U32), self.unpack(_U64)
        if element in _SCALARS:
            dtype = np.dtype("<" + _SCALARS[element]) if element != 7 else np.dtype(bool)
            return np.frombuffer(self._take(length * dtype.itemsize), dtype)
        if element == _STRING:
            return self._strings(length)
        return [self.value(element) for _ in range(length)]

    def _strings(self, count: int) -> list[str]:
        # A vocabulary holds hundreds of thousands of strings, so this loop stays free of method calls.
        data, offset, end = self._data, self._offset, len(self._data)
        length_at, strings = _U64.unpack_from, []
        for _ in range(count):
            start = offset + 8
            offset = start + length_at(data, offset)[0]
            if offset > end:
                raise ValueError(f"a string reaches to offset {offset} of {end}")
            strings.append(data[start:offset].decode())
        self._offset = offset
        return strings

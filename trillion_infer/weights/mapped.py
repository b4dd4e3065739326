"""A file as bytes in memory, read by the kernel only where it is touched."""

import mmap
from pathlib import Path

import numpy as np

from trillion_infer.core.errors import ModelLoadError


class MappedFile:
    """Read-only map of a whole file; `bytes` is a uint8 view that keeps the map alive."""

    def __init__(self, path: Path):
        self.path = path
        try:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise ModelLoadError(
                f"{path} is empty; the download is probably incomplete, fetch the file again"
            ) from error
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}") from error
        self.bytes = np.frombuffer(self._map, np.uint8)

    @property
    def size(self) -> int:
        """Length in bytes."""
        return len(self.bytes)

    def release(self, begin: int, end: int) -> None:
        """Drops the pages of `[begin, end)` from this process; they come back from the kernel's cache when touched."""
        if hasattr(mmap, "MADV_DONTNEED"):
            first = begin - begin % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, first, end - first)

"""Destinations of loaded values: the part of a parameter that one device, or several replicas, hold."""

import math
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from trillion_infer.weights.spec import HOST_MEMORY

Fill = Callable[[np.ndarray], None]
ALIGNMENT = 64  # bytes; XLA's CPU backend shares a host buffer that is aligned so, and copies any other


def mapped_zeros(shape: Sequence[int], dtype: np.dtype, folder: Path) -> tuple[np.ndarray, mmap.mmap]:
    """Zeros in a file without a name, which lasts as long as they, and its mapping. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    size = max(1, math.prod(shape) * dtype.itemsize)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error here, not a signal at a write
        pages = mmap.mmap(file.fileno(), size)
    return np.frombuffer(pages, dtype, math.prod(shape)).reshape(shape), pages


def aligned_zeros(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Zeros whose first byte lies on an `ALIGNMENT` boundary, in pages that are only taken when written."""
    size = math.prod(shape) * dtype.itemsize
    if size >= 1 << 20:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared ones have no huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
        else:
            pages = mmap.mmap(-1, size)
        return np.frombuffer(pages, dtype).reshape(shape)
    data = np.zeros(size + ALIGNMENT, np.uint8)
    start = -data.ctypes.data % ALIGNMENT
    return data[start : start + size].view(dtype).reshape(shape)


class Shard(Protocol):
    """Takes values by regions, from any thread, then becomes one array a device."""

    def write(self, where: tuple[slice, ...], fill: Fill) -> None:
        """Calls `fill` with a writable array of the region's shape; `where` is in the shard's own coordinates."""
        ...

    def finish(self) -> list[jax.Array]:
        """The shard on each of its devices. Regions never written are zero."""
        ...


class HostShard:
    """Filled in host memory, then handed over whole: shared without a copy on CPU devices, sent to others."""

    def __init__(self, shape: Sequence[int], dtype: np.dtype, places: Sequence[SingleDeviceSharding]):
        self._block = aligned_zeros(shape, dtype)
        self._places = places

    def write(self, where: tuple[slice, ...], fill: Fill) -> None:
        fill(self._block[where])

    def finish(self) -> list[jax.Array]:
        arrays = [jax.device_put(self._block, place) for place in self._places]
        del self._block
        return arrays


class MappedShard(HostShard):
    """In a mapped file, whose pages leave memory once they are written: the parameter may be larger than memory."""

    def __init__(self, shape: Sequence[int], dtype: np.dtype, places: Sequence[SingleDeviceSharding], folder: Path):
        self._block, self._pages = mapped_zeros(shape, dtype, folder)
        self._places = places

    def write(self, where: tuple[slice, ...], fill: Fill) -> None:
        super().write(where, fill)
        self._let_go()

    def finish(self) -> list[jax.Array]:
        arrays = super().finish()
        self._let_go()
        return arrays

    def _let_go(self) -> None:
        """The pages stay in the file, and in the system's cache while it has room."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._pages.madvise(mmap.MADV_DONTNEED)


def in_files(params: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Parameters that were not read by shards: those in host memory are copied to mapped files, an array at a time."""

    def moved(array: jax.Array) -> jax.Array:
        if array.sharding.memory_kind != HOST_MEMORY:
            return array
        local = []
        for each in array.addressable_shards:
            place = SingleDeviceSharding(each.device, memory_kind=HOST_MEMORY)
            shard = MappedShard(each.data.shape, np.dtype(array.dtype), [place], folder)
            shard.write((slice(None),) * array.ndim, partial(_copy_to, values=each.data))
            local += shard.finish()
        return jax.make_array_from_single_device_arrays(array.shape, array.sharding, local)

    return {name: jax.tree.map(moved, held) for name, held in params.items()}


def _copy_to(block: np.ndarray, values: jax.Array) -> None:
    np.copyto(block, np.asarray(values))


class StagedShard:
    """Zeros on each device, filled in place, a block of host memory at a time; the budget bounds blocks in flight."""

    def __init__(self, blank: list[jax.Array], places: Sequence[SingleDeviceSharding], budget: "ByteBudget"):
        self._arrays, self._places, self._budget = blank, places, budget
        self._dtype = blank[0].dtype
        self._lock = threading.Lock()

    def write(self, where: tuple[slice, ...], fill: Fill) -> None:
        shape = tuple(len(range(s.start, s.stop, s.step or 1)) for s in where)
        with self._budget.reserve(math.prod(shape) * self._dtype.itemsize):
            block = np.empty(shape, self._dtype)
            fill(block)
            if all(s.step in (None, 1) for s in where):
                update, at = _update, np.array([s.start for s in where], np.int32)
            else:
                update, at = _scatter, np.ix_(*(np.arange(s.start, s.stop, s.step, dtype=np.int32) for s in where))
            for i, place in enumerate(self._places):
                sent, position = jax.device_put((block, at), place)
                with self._lock:
                    self._arrays[i] = update(self._arrays[i], sent, position)
                    self._arrays[i].block_until_ready()

    def finish(self) -> list[jax.Array]:
        return self._arrays


class ByteBudget:
    """A number of bytes that threads share; one request larger than all of it is let through alone."""

    def __init__(self, limit: int):
        self._limit, self._used = limit, 0
        self._changed = threading.Condition()

    @contextmanager
    def reserve(self, size: int) -> Iterator[None]:
        """Waits until `size` bytes are free, and gives them back at its end."""
        with self._changed:
            self._changed.wait_for(lambda: self._used == 0 or self._used + size <= self._limit)
            self._used += size
        try:
            yield
        finally:
            with self._changed:
                self._used -= size
                self._changed.notify_all()


@partial(jax.jit, donate_argnums=0)
def _update(array: jax.Array, block: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(array, block, tuple(start))


@partial(jax.jit, donate_argnums=0)
def _scatter(array: jax.Array, block: jax.Array, at: tuple[jax.Array, ...]) -> jax.Array:
    return array.at[at].set(block, unique_indices=True)

"""Pages of mapped files are read when they are asked for, and no others."""

import ctypes
import mmap
import os
import time

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from pallas_kernels.cpu_native import will_need

LAYERS, EXPERTS, EACH = 2, 4, 64
"""EACH: pages of an expert."""


def resident(array: np.ndarray) -> np.ndarray:
    """Which pages of a mapped array `[L, E, …]` lie in memory, `[L, E, EACH]`."""
    found = np.zeros(array.nbytes // mmap.PAGESIZE, np.uint8)
    address, size = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)
    assert ctypes.CDLL(None).mincore(address, size, found.ctypes.data_as(ctypes.c_void_p)) == 0
    return (found & 1).astype(bool).reshape(LAYERS, EXPERTS, EACH)


@pytest.fixture
def on_disk(tmp_path):
    """A stack in a file that no cache holds."""
    path = tmp_path / "stack"
    path.write_bytes(os.urandom(LAYERS * EXPERTS * EACH * mmap.PAGESIZE))
    with path.open("r+b") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        pages = mmap.mmap(file.fileno(), 0)
    array = np.frombuffer(pages, np.uint8).reshape(LAYERS, EXPERTS, -1)
    if resident(array).any():
        pytest.skip("the file system of temporary files lies in memory")
    return array


def test_what_is_wanted_is_read_and_nothing_else(on_disk):
    stack = jax.device_put(on_disk, SingleDeviceSharding(jax.devices()[0]))
    ask = jax.jit(lambda stack, layer, wanted, then: will_need([stack], layer, wanted, then))
    wanted, then = np.array([False, True, False, True]), np.array([True, True, False, False])
    assert ask(stack, np.int32(LAYERS), wanted, then).tolist() == then.tolist()
    assert not resident(on_disk).any()
    assert ask(stack, np.int32(1), wanted, then).tolist() == then.tolist()
    end = time.monotonic() + 5
    while not resident(on_disk)[1, wanted].all() and time.monotonic() < end:
        time.sleep(0.01)
    found = resident(on_disk)
    assert found[1, wanted].all()
    assert not found[0].any()
    assert not found[1, ~wanted].any()

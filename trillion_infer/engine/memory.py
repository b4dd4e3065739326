"""Where memory goes: what nobody accounts for, and errors that say who holds it and what would fit."""

import ctypes
import math
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from trillion_infer.core.errors import OutOfMemoryError
from trillion_infer.engine.ops import device_memory, platform_of
from trillion_infer.weights.spec import HOST_MEMORY

FLAGS = {
    "weights": "dtype, a quantised checkpoint, or a mesh that splits them over more devices",
    "kv": "kv_memory",
    "drafter": "speculate",
    "host_kv": "host_kv",
    "sampler": "max_running (a row of the vocabulary each)",
    "page_tables": "max_running and max_model_len",
    "program_temporaries": "prefill_chunk and max_running",
}
"""What lowers each holder of `LLM.memory()`."""


MALLOC_TRIM_THRESHOLD, MALLOC_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt(3)."""


def keep_freed_memory() -> None:
    """Has glibc's malloc keep freed blocks of up to 32 MiB for the rest of the process, 256 MiB of them at its end.

    By default it gives large ones back to the system, so that a CPU device's next array takes a page fault every
    4 KiB, which costs as much as to copy it. No effect with another C library.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(MALLOC_MMAP_THRESHOLD, 32 * 2**20)
        libc.mallopt(MALLOC_TRIM_THRESHOLD, 256 * 2**20)


def give_back_freed_memory() -> None:
    """Has glibc's malloc give back every page that holds nothing; compilers leave hundreds of MB of them. No effect
    with another C library."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def device_bytes(tree: Any) -> int:
    """Bytes that (abstract) arrays take on one device; those in host memory take none."""
    leaves = filter(is_on_device, jax.tree.leaves(tree))
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def is_on_device(leaf: Any) -> bool:
    """Whether an (abstract) array lies in device memory."""
    return leaf.sharding.memory_kind != HOST_MEMORY


def in_use(mesh: Mesh) -> int | None:
    """Bytes that this process's devices of the mesh hold; on CPU what the process has resident. None: not told."""
    if platform_of(mesh) == "cpu":
        return resident()
    local = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    told = [device_memory(device) for device in local]
    return sum(each[1] for each in told if each is not None) if all(told) else None


def resident() -> int | None:
    """Bytes of this process in memory now."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
        return pages * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else None


def with_unaccounted(holders: Mapping[str, int], mesh: Mesh, on_host: Mapping[str, int]) -> dict[str, int]:
    """The holders and, where the system tells, `unaccounted`: what is in use beside those that stay.

    On CPU these are the interpreter, the libraries and the compiled code; pages never written are not counted, and what
    is `on_host` lies in the same memory.
    """
    used = in_use(mesh)
    if used is None:
        return dict(holders)
    here = {**holders, **on_host} if platform_of(mesh) == "cpu" else holders
    elsewhere = ("program_temporaries", "disk_kv", "experts_on_disk")
    stays = sum(size for name, size in here.items() if name not in elsewhere)
    return {**holders, "unaccounted": max(0, used - stays)}


@contextmanager
def told_as_ours(what: str, holders: Mapping[str, int]) -> Iterator[None]:
    """An allocation that the devices refuse becomes an OutOfMemoryError: what was wanted, who holds how much, and the
    flags that lower it."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = (str(error).splitlines() or ["out of memory"])[0]
        raise OutOfMemoryError(f"there is no memory for {what} ({reason}). {holders_text(holders)}") from error


def holders_text(holders: Mapping[str, int]) -> str:
    """A sentence on who holds what, the largest first, and one on what to lower."""
    ordered = sorted((name for name in holders if holders[name]), key=lambda name: -holders[name])
    held = ", ".join(f"{name} {holders[name] / 2**20:,.1f} MiB" for name in ordered)
    lower = "; ".join(
        dict.fromkeys(FLAGS["kv" if name.startswith("kv_") else name] for name in ordered if _known(name))
    )
    return f"Held or wanted: {held}. Lower, the largest first: {lower}."


def _known(name: str) -> bool:
    return name in FLAGS or name.startswith("kv_")

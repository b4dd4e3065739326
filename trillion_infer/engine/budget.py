"""How many pages the KV pools get: what the devices have, less weights, temporaries and a reserve."""

import math
import os
from collections.abc import Callable, Sequence
from functools import partial

import jax
from jax.sharding import Mesh

from trillion_infer.cache.layout import PoolLayout
from trillion_infer.config.cache import CacheGroup
from trillion_infer.core.errors import OutOfMemoryError
from trillion_infer.engine.ops import device_memory, platform_of

CPU_LIMIT = 1 << 29
"""Most bytes the pools take on CPU when nobody says: host memory is shared with everything else."""

RESERVE = {"tpu": 1 << 29, "gpu": 1 << 30, "cuda": 1 << 30}
"""Bytes a device kept for the runtime."""


def local_page_bytes(layout: PoolLayout, mesh: Mesh) -> int:
    """Bytes of one page on one device."""
    leaves = jax.tree.leaves(layout.abstract(mesh.shape["data"], mesh))
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def available(mesh: Mesh, kv_memory: float | None, temp_bytes: int) -> int:
    """Bytes a device for the pools. kv_memory: bytes for the whole mesh (above 1), a fraction of what is free, None."""
    if kv_memory is not None and kv_memory > 1:
        return int(kv_memory) // mesh.devices.size
    device = next(d for d in mesh.devices.flat if d.process_index == jax.process_index())
    memory = device_memory(device)
    if platform_of(mesh) == "cpu" or memory is None:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // mesh.devices.size
        limit = CPU_LIMIT // mesh.devices.size if kv_memory is None else free
        return int(min(limit, free * (0.5 if kv_memory is None else kv_memory)))
    limit, used = memory
    free = limit - used - temp_bytes - RESERVE.get(platform_of(mesh), 1 << 30)
    return int(free * (kv_memory or 1.0))


def request_needs(
    layouts: Sequence[PoolLayout],
    mesh: Mesh,
    length: int,
    extend_len: int,
    beside: Sequence[Sequence[PoolLayout]] = (),
) -> tuple[list[int], int]:
    """Pages of each group, and bytes a device, that a request of this length takes; `beside` as for `divide`."""
    groups, sizes = _groups(layouts, mesh, beside)
    pages = [group.pages_for(length, extend_len, layouts[0].page_size) for group in groups]
    return pages, sum(n * size for n, size in zip(pages, sizes, strict=True))


def _groups(
    layouts: Sequence[PoolLayout], mesh: Mesh, beside: Sequence[Sequence[PoolLayout]]
) -> tuple[list[CacheGroup], list[int]]:
    """A group of one page for each layout, and the bytes that its page takes on a device."""
    groups = [CacheGroup(lay.key.name, lay.key.window, 1, lay.key.chunk) for lay in layouts]
    sizes = [local_page_bytes(layout, mesh) for layout in layouts]
    for group, others in enumerate(beside):
        sizes[group] += sum(local_page_bytes(layout, mesh) for layout in others)
    return groups, sizes


def divide(
    layouts: Sequence[PoolLayout],
    mesh: Mesh,
    budget: int,
    *,
    max_running: int,
    max_model_len: int,
    extend_len: int,
    taken: str = "",
    beside: Sequence[Sequence[PoolLayout]] = (),
) -> list[CacheGroup]:
    """Groups with as many pages as `budget` bytes a device hold, never more than `max_running` full requests use.

    Groups share the budget in proportion to what one request of full length needs of each. Raises OutOfMemoryError
    when there is no room for one page of each; `taken` then says what took the rest.
    beside: for each group, the pools that have its pages too.
    """
    page_size = layouts[0].page_size
    groups, sizes = _groups(layouts, mesh, beside)
    need = partial(request_needs, layouts, mesh, extend_len=extend_len, beside=beside)
    per_request, request_bytes = need(max_model_len)
    requests = min(max_running, budget / request_bytes)
    pages = [math.floor(n * requests) for n in per_request]
    if min(pages) < 1:
        each = ", ".join(f"{g.name}: {s:,}" for g, s in zip(groups, sizes, strict=True))
        least = max(math.ceil(request_bytes / min(per_request)), sum(sizes)) * mesh.devices.size
        raise OutOfMemoryError(
            f"the KV budget is {budget:,} bytes a device{f' ({taken})' if taken else ''}; one page of {page_size} "
            f"tokens takes {sum(sizes):,} ({each}) "
            f"and a request of max_model_len {max_model_len} takes {request_bytes:,}. "
            f"{_largest_that_fits(need, budget, page_size, max_model_len)} Raise kv_memory to {least:,} or more, or "
            "lower page_size, max_model_len, or the weights' size (dtype, more devices)."
        )
    return [CacheGroup(g.name, g.window, n, g.chunk) for g, n in zip(groups, pages, strict=True)]


def _largest_that_fits(
    need: Callable[[int], tuple[list[int], int]], budget: int, page_size: int, max_model_len: int
) -> str:
    """Says the largest max_model_len, in whole pages, for which the budget holds one request."""
    low, high = 0, max_model_len // page_size
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if need(middle * page_size)[1] <= budget else (low, middle - 1)
    if low == 0:
        return f"Not even one request of {page_size} tokens fits."
    return f"The largest max_model_len of which one request fits is {low * page_size}."

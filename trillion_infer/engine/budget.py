"""How many pages the KV pools get: what the devices have, less weights, temporaries and a reserve."""

import math
import os
from collections.abc import Sequence

import jax
from jax.sharding import Mesh, NamedSharding

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
    shard = NamedSharding(mesh, layout.spec).shard_shape(layout.shape(mesh.shape["data"]))
    return math.prod(shard) * jax.numpy.dtype(layout.dtype).itemsize


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


def divide(
    layouts: Sequence[PoolLayout], mesh: Mesh, budget: int, *, max_running: int, max_model_len: int, extend_len: int
) -> list[CacheGroup]:
    """Groups with as many pages as `budget` bytes a device hold, never more than `max_running` full requests use.

    Groups share the budget in proportion to what one request of full length needs of each. Raises OutOfMemoryError
    when there is no room for one page of each.
    """
    page_size = layouts[0].page_size
    groups = [CacheGroup(lay.key.name, lay.key.window, 1, lay.key.chunk) for lay in layouts]
    per_request = [group.pages_for(max_model_len, extend_len, page_size) for group in groups]
    sizes = [local_page_bytes(layout, mesh) for layout in layouts]
    request_bytes = sum(n * size for n, size in zip(per_request, sizes, strict=True))
    requests = min(max_running, budget / request_bytes)
    pages = [math.floor(n * requests) for n in per_request]
    if min(pages) < 1:
        raise OutOfMemoryError(
            f"the KV budget is {budget:,} bytes a device; one page of {page_size} tokens takes {sum(sizes):,} "
            f"({', '.join(f'{g.name}: {s:,}' for g, s in zip(groups, sizes, strict=True))}) and a request of "
            f"max_model_len {max_model_len} takes {request_bytes:,}. Raise kv_memory, or lower page_size, "
            "max_model_len or the weights' size (dtype, more devices)."
        )
    return [CacheGroup(g.name, g.window, n, g.chunk) for g, n in zip(groups, pages, strict=True)]

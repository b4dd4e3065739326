"""What the machine can do at most: memory reads and matrix products, measured on the default device."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

READ_BYTES = 1 << 28
"""Read at a time: beyond every cache."""


def machine_limits(read_bytes: int = READ_BYTES, side: int | None = None) -> dict[str, float]:
    """read_gb_s, bf16_gflops and f32_gflops; the products are of square matrices of `side`, accumulated in float32."""
    on_cpu = jax.default_backend() == "cpu"
    side = side or (2048 if on_cpu else 8192)
    return {
        "read_gb_s": (_host_read(read_bytes) if on_cpu else _device_read(8 * read_bytes)) / 1e9,
        "bf16_gflops": _product_flops(jnp.bfloat16, side) / 1e9,
        "f32_gflops": _product_flops(jnp.float32, side) / 1e9,
    }


def _best(work: Callable[[], object], seconds: float = 1.0, most: int = 20) -> float:
    """Shortest of several runs after one that does not count, within about `seconds`."""
    work()
    times: list[float] = []
    while len(times) < 2 or (sum(times) < seconds and len(times) < most):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def _host_read(size: int) -> float:
    """Bytes a second when every core takes the maximum of its share of an array."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shares = np.array_split(np.ones(size // 4, np.int32), cores)
    with ThreadPoolExecutor(cores) as pool:
        return size / _best(lambda: list(pool.map(np.max, shares)))


def _device_read(size: int) -> float:
    array = jnp.ones(size // 4, jnp.int32)
    largest = jax.jit(jnp.max)
    return size / _best(lambda: largest(array).block_until_ready())


def _product_flops(dtype: DTypeLike, side: int) -> float:
    a = jnp.full((side, side), 0.5, dtype)
    product = jax.jit(lambda x, y: jnp.matmul(x, y, preferred_element_type=jnp.float32))
    return 2 * side**3 / _best(lambda: product(a, a).block_until_ready())

"""Whole pages out of a pool and into it, copied as bytes."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.cpu_native.load import require


def read_pages(pool: Array, ids: Int[Array, "n"]) -> Array:
    """`pool[:, ids]` of a pool `[L, P, …]`; an id out of range reads the nearest page.

    Raises NotImplementedError where there is no native library.
    """
    require("auto")
    result = jax.ShapeDtypeStruct((pool.shape[0], ids.shape[0], *pool.shape[2:]), pool.dtype)
    return jax.ffi.ffi_call("ti_read_pages", result)(pool, ids)


def write_pages(pool: Array, ids: Int[Array, "n"], data: Array, first: Int[Array, ""] | int = 0) -> Array:
    """The pool with `data[:, i]` in page `ids[i]`, in place where it is donated; an id out of range writes nothing.

    first: the pool's layer that `data[0]` is of; the data may be of fewer layers than the pool has.

    Raises NotImplementedError where there is no native library.
    """
    require("auto")
    result = jax.ShapeDtypeStruct(pool.shape, pool.dtype)
    return jax.ffi.ffi_call("ti_write_pages", result, input_output_aliases={0: 0})(
        pool, ids, data, jnp.asarray(first, jnp.int32)
    )

"""How keys and values are stored in a pool: plain floats, or numbers of 8 bits times one scale."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.common.quantised_pool import quantise


def encode(x: Float[Array, "..."], scale: float | None, dtype: jnp.dtype) -> Array:
    """`x / scale` in `dtype`, held within the range of `dtype` where that has 8 bits."""
    if scale is not None:
        x = x.astype(jnp.float32) * (1.0 / scale)
    if jnp.dtype(dtype) == jnp.int8:
        return jnp.clip(jnp.round(x), -127, 127).astype(jnp.int8)
    if jnp.dtype(dtype).itemsize == 1:
        limit = float(jnp.finfo(dtype).max)
        x = jnp.clip(x.astype(jnp.float32), -limit, limit)
    return x.astype(dtype)


def interleave(
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    pool: Array,
    k_scale: float | None,
    v_scale: float | None,
) -> Array:
    """The rows that the pool keeps for new tokens, `[T, 2K/pack, pack, D]`: heads k0, v0, k1, v1, …"""
    return _fit(jnp.stack([encode(k, k_scale, pool.dtype), encode(v, v_scale, pool.dtype)], axis=2), pool)


def interleave_quantised(
    k: Float[Array, "T K D"], v: Float[Array, "T K D"], pool: Array
) -> tuple[Array, Float[Array, "T 2K"]]:
    """The rows as `interleave` gives them, and the scale of each head: k0, v0, k1, v1, …"""
    rows, scales = quantise(jnp.stack([k, v], axis=2), pool.dtype)
    return _fit(rows, pool), scales.reshape(k.shape[0], -1)


def _fit(rows: Array, pool: Array) -> Array:
    """`[T, K, 2, D]` as rows of the pool, unused lanes zero."""
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, 0), (0, pool.shape[-1] - rows.shape[-1])))
    return rows.reshape(rows.shape[0], *pool.shape[3:])


def pool_shape(
    layers: int, pages: int, page_size: int, kv_heads: int, dim: int, dtype: jnp.dtype, platform: str
) -> tuple[int, ...]:
    """Shape of a pool, `[L, P, p, 2K/pack, pack, D]`, that the implementation for `platform` takes.

    On TPU a 32-bit word holds pack = 4 / itemsize heads, and D is rounded up to 128 lanes, which the chip's
    tiles take up in any case. Raises ValueError where 2K is no multiple of pack.
    """
    if platform != "tpu":
        return layers, pages, page_size, 2 * kv_heads, 1, dim
    pack = 4 // jnp.dtype(dtype).itemsize
    if 2 * kv_heads % pack:
        raise ValueError(f"{2 * kv_heads} heads of keys and values do not fill words of {pack}; use a wider dtype.")
    return layers, pages, page_size, 2 * kv_heads // pack, pack, -(-dim // 128) * 128


def scale_shape(layers: int, pages: int, page_size: int, kv_heads: int) -> tuple[int, int, int, int]:
    """Shape of the scales of a quantised pool, `[L, P, 2K, p]`: heads k0, v0, k1, v1, …, then the slots of the page."""
    return layers, pages, 2 * kv_heads, page_size

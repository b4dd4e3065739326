"""How keys and values are stored in a pool: plain floats, or numbers of 8 bits times one scale."""

import jax.numpy as jnp
from jaxtyping import Array, Float


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
    tokens = k.shape[0]
    pair = [encode(k, k_scale, pool.dtype), encode(v, v_scale, pool.dtype)]
    return jnp.stack(pair, axis=2).reshape(tokens, *pool.shape[3:])

"""Pools of 8-bit numbers with their scales as data: one scale a slot and row, in a second pool beside the first.

The scales have the pool's layers and pages, then `[rows, slots]`, so that a row's scales of a page lie side by side,
as they meet the scores. On TPU a page (or a shard's part of it) must have a multiple of 128 slots, or the scales would
be padded and copied. A slot keeps the scale that its token was written with: the same tokens have the same bits
whole or in chunks, alone or in a batch.
"""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

LIMITS = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""Largest magnitude of each dtype that a quantised pool may have."""


def quantise(x: Float[Array, "... D"], dtype: DTypeLike) -> tuple[Array, Float[Array, "..."]]:
    """`x` as numbers of 8 bits times one float32 scale for each vector of the last axis: its amax over the limit.

    Rounds to nearest, ties to even: an int8 element is off by at most half its scale, an fp8 one (4 significant bits)
    by at most 1/16 of itself, or 2**-10 of its scale where it is subnormal. A vector of zeros has scale 0, and so has
    one whose scale float32 cannot hold (all below 1e-30 or so).
    """
    limit = LIMITS[jnp.dtype(dtype).name]
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / limit
    numbers = jnp.clip(x / jnp.where(scale > 0, scale, 1)[..., None], -limit, limit)
    return (jnp.round(numbers) if jnp.dtype(dtype) == jnp.int8 else numbers).astype(dtype), scale


def write_scales(
    scales: Float[Array, "L P N p"],
    new: Float[Array, "T N"],
    layer: Int[Array, ""],
    page: Int[Array, " T"],
    slot: Int[Array, " T"],
) -> Float[Array, "L P N p"]:
    """`scales` with those of each token at its page and slot (`token_places`), in place where the caller donates."""
    page = jnp.where(page < 0, scales.shape[1], page)
    return scales.at[jnp.broadcast_to(layer, page.shape), page, :, slot].set(new, mode="drop")


def refusal_on_tpu(scales: Array | None) -> str | None:
    """Why the TPU kernels cannot read these scales where they lie, None where they can."""
    if scales is None or scales.shape[3] % 128 == 0:
        return None
    return f"scales of pages of {scales.shape[3]} slots would be copied; use pages of a multiple of 128 slots a device."


def check_scales(op: str, pool: Array, scales: Array, rows: int) -> None:
    """Raises ValueError unless `scales` fits a quantised pool `[L, P, p, …]` with `rows` scales a slot."""
    if pool.dtype.name not in LIMITS:
        raise ValueError(f"{op}: scales go with a pool of {' or '.join(LIMITS)}; this pool has {pool.dtype.name}.")
    shape = (*pool.shape[:2], rows, pool.shape[2])
    if scales.shape != shape or scales.dtype != jnp.float32:
        raise ValueError(
            f"{op}: the scales of a pool of {pool.shape} must be float32 of shape {shape} (layers, pages, rows, slots);"
            f" got {scales.dtype.name} of {scales.shape}."
        )

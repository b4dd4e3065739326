"""Latent attention where every device holds some slots of each page: queries come to the slots, results go back."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.common.slot_shard import merge_parts
from trillion_infer.layers.context import Context
from trillion_infer.layers.pools import Pool
from trillion_infer.layers.slots import Batch, token_slice

SLICE_BYTES = 16 << 20
"""Gathered queries held at once; what comes out of them takes about ten times as much."""

New = tuple[Array, Array, Array, Array]
"""q_latent `[T, H, Rl]`, q_rope `[T, H, Rr]`, latent `[T, Rl]`, k_rope `[T, Rr]`: of this device's tokens and heads."""


def attend_over_slots(
    attend: Callable[..., tuple[Array, ...]],
    new: New,
    pool: Pool,
    layer: Int[Array, ""],
    batch: Batch,
    ctx: Context,
) -> tuple[Float[Array, "T H Rl"], Pool]:
    """Latent attention over all devices' slots, for the tokens and heads of this device; and the pool.

    attend: the op with its options and this device's slots. Queries are gathered over heads a slice of tokens at a
    time, so that a long prefill chunk does not need memory for those of all heads at once.
    """
    q_latent, q_rope, latent, k_rope = map(ctx.whole_tokens, new)
    heads, splits = ctx.axes("heads"), "sequence" in ctx.axes("latent_slots")
    queries = jnp.concatenate((q_latent, q_rope), axis=2)
    tokens, rank = queries.shape[0], q_latent.shape[2]

    def one_slice(pool, parts, batch):
        queries, latent, k_rope = parts
        whole = lax.all_gather(queries, heads, axis=1, tiled=True) if heads else queries
        out, lse, pool = attend(whole[:, :, :rank], whole[:, :, rank:], latent, k_rope, pool, layer, *batch)
        if heads:
            out, lse = merge_parts(out, lse, heads, scatter=1)
        return pool, (out if splits else out.astype(q_latent.dtype), lse)

    size = slice_tokens(tokens, ctx.axis_sizes, queries)
    if size >= tokens:
        pool, (out, lse) = one_slice(pool, (queries, latent, k_rope), batch)
    else:
        sliced = tuple(_in_slices(x, size) for x in (queries, latent, k_rope))

        def body(pool, xs):
            start, parts = xs
            return one_slice(pool, parts, token_slice(batch, start, size))

        starts = jnp.arange(sliced[0].shape[0], dtype=jnp.int32) * size
        pool, results = lax.scan(body, pool, (starts, sliced))
        out, lse = (x.reshape(-1, *x.shape[2:])[:tokens] for x in results)
    if splits:
        out, _ = merge_parts(out, lse, ("sequence",), scatter=0 if ctx.token_axes else None)
    return out.astype(q_latent.dtype), pool


def slice_tokens(tokens: int, sizes, queries: Float[Array, "T H R"]) -> int:
    """Query tokens to gather at a time: a power of two whose queries of all heads take SLICE_BYTES or less."""
    each = queries.nbytes // tokens * sizes["expert"] * sizes["tensor"]
    return min(tokens, 1 << max(4, (SLICE_BYTES // each).bit_length() - 1))


def _in_slices(x: Array, size: int) -> Array:
    """`[T, …]` -> `[N, size, …]`, padded with zeros."""
    padded = jnp.pad(x, ((0, -x.shape[0] % size), *[(0, 0)] * (x.ndim - 1)))
    return jax.lax.reshape(padded, (padded.shape[0] // size, size, *x.shape[1:]))

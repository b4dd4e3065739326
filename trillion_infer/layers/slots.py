"""Attention where the slots of every KV page are spread over devices: who holds what, and how a batch is sliced."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.common.slot_shard import SlotShard
from trillion_infer.layers.context import Context

Batch = tuple[Int[Array, "S"], Int[Array, "S B"], Int[Array, "S+1"], Int[Array, "2"]]
"""kv_lens, page_table, cu_q_lens, num_seqs, as the attention ops take them."""


def slot_shard(ctx: Context, logical: str) -> SlotShard | None:
    """The slots that this device holds of a pool's pages, split along a logical axis; None: all of them."""
    axes = ctx.axes(logical)
    if not axes:
        return None
    return SlotShard(jnp.asarray(ctx.shard_index(logical)), math.prod(ctx.axis_sizes[axis] for axis in axes))


def batch_of(ctx: Context, place: int) -> Batch:
    """The step's batch for the pool at `place`."""
    sequences = ctx.sequences
    return sequences.kv_lens, sequences.page_tables[place], sequences.cu_q_lens, sequences.num_seqs


def token_slice(batch: Batch, start: Int[Array, ""], size: int) -> Batch:
    """The batch of query tokens [start, start + size) alone, as if the later ones had not come yet.

    Slices taken one after the other write and see what the whole batch would. Sequences that end before the slice
    are left out, so that those of one query token still lead.
    """
    kv_lens, table, cu_q_lens, num_seqs = batch
    count = kv_lens.shape[0]
    before = jnp.searchsorted(cu_q_lens[1:], start, side="right").astype(jnp.int32)
    place = jnp.minimum(jnp.arange(count, dtype=jnp.int32) + before, count - 1)
    ends = cu_q_lens[place + 1]
    cut = jnp.clip(ends, start, start + size)
    begun = jnp.searchsorted(cu_q_lens[:count], start + size, side="left").astype(jnp.int32)
    real = jnp.maximum(jnp.minimum(begun, num_seqs[1]) - before, 0)
    lens = jnp.where(jnp.arange(count) < real, kv_lens[place] - (ends - cut), 0)
    decode = jnp.clip(num_seqs[0] - before, 0, real)
    starts = jnp.concatenate((jnp.zeros(1, jnp.int32), cut - start))
    return lens, table[place], starts, jnp.stack((decode, real))

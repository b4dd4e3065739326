"""Latent paged attention in plain XLA: what the kernels are compared with, and the implementation for CPU.

Softmax is taken online, in float32, over chunks of pages (Milakov and Gimelshein 2018), so that memory is bounded
by one chunk of latents whatever the context. Every loop runs as often as the batch needs, not as its bucket allows.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.common.page_writes import write_pages
from pallas_kernels.common.quantised_pool import quantise, write_scales
from pallas_kernels.common.slot_shard import SlotShard, log_sum, whole_pages
from pallas_kernels.common.token_places import token_places
from pallas_kernels.common.varying import vary_like

LOWEST = -1e30
CHUNK_TOKENS = 256
DECODE_SEQUENCES = 8
BLOCK_QUERIES = 16


def write_latents(
    latent: Float[Array, "T Rl"],
    k_rope: Float[Array, "T Rr"],
    pool: Float[Array, "L P p R"],
    layer: Int[Array, ""],
    kv_lens: Int[Array, "S"],
    page_table: Int[Array, "S B"],
    cu_q_lens: Int[Array, "S+1"],
    num_seqs: Int[Array, "2"],
    slots: SlotShard,
    kv_scales: Float[Array, "L P 2 p"] | None = None,
    by_pages: bool = False,
) -> tuple[Array, Float[Array, "L P 2 p"] | None]:
    """The pool, and its scales, with each new token at its page and slot, unused lanes zeroed.

    What is padding or another shard's goes nowhere. by_pages: as `common.page_writes` does it.
    """
    tokens, (_, pages, page_size, _) = latent.shape[0], pool.shape
    page, slot = token_places(tokens, page_size, kv_lens, page_table, cu_q_lens, num_seqs, slots)
    rows, new_scales = new_rows(latent, k_rope, pool, quantised=kv_scales is not None)
    if kv_scales is not None:
        kv_scales = write_scales(kv_scales, new_scales, layer, page, slot)
    if by_pages:
        return write_pages(pool, rows, layer, page, slot), kv_scales
    page = jnp.where(page < 0, pages, page)
    return pool.at[jnp.broadcast_to(layer, page.shape), page, slot].set(rows, mode="drop"), kv_scales


def new_rows(
    latent: Float[Array, "T Rl"], k_rope: Float[Array, "T Rr"], pool: Array, *, quantised: bool
) -> tuple[Float[Array, "T R"], Float[Array, "T 2"]]:
    """The rows that the pool keeps for new tokens, and where quantised the scales of latent and rotary part."""
    if quantised:
        latent, by_latent = quantise(latent, pool.dtype)
        k_rope, by_rope = quantise(k_rope, pool.dtype)
        scales = jnp.stack([by_latent, by_rope], axis=1)
    else:
        scales = jnp.ones((latent.shape[0], 2))
    rows = jnp.concatenate([latent.astype(pool.dtype), k_rope.astype(pool.dtype)], axis=1)
    return jnp.pad(rows, ((0, 0), (0, pool.shape[3] - rows.shape[1]))), scales


def attend(
    q_latent: Float[Array, "T H Rl"],
    q_rope: Float[Array, "T H Rr"],
    pool: Float[Array, "L P p R"],
    layer: Int[Array, ""],
    kv_lens: Int[Array, "S"],
    page_table: Int[Array, "S B"],
    cu_q_lens: Int[Array, "S+1"],
    num_seqs: Int[Array, "2"],
    *,
    scale: float,
    max_q_len: int | None,
    slots: SlotShard | None,
    kv_scales: Float[Array, "L P 2 p"] | None = None,
) -> tuple[Float[Array, "T H Rl"], Float[Array, "T H"] | None]:
    """Output and, where the pool is a shard, log-sum-exp of the op, for a pool that already holds the new tokens."""
    tokens, rank = q_latent.shape[0], q_latent.shape[2]
    q = jnp.concatenate([q_latent, q_rope], axis=2)
    shard, block = slots or whole_pages(), min(BLOCK_QUERIES, tokens)
    q = jnp.pad(q, ((0, DECODE_SEQUENCES + block), (0, 0), (0, 0)))
    out = jnp.zeros((*q.shape[:2], rank + 1))
    out = vary_like(out, q, pool, layer, kv_lens, page_table, cu_q_lens, shard)

    def attend_rows(queries, position, table):
        return _attend_rows(queries, position, pool, kv_scales, layer, table, scale=scale, rank=rank, slots=shard)

    out = _decode(attend_rows, q, out, kv_lens, page_table, num_seqs)
    if max_q_len != 1:
        out = _prefill(attend_rows, q, out, kv_lens, page_table, cu_q_lens, num_seqs, block)
    if slots is None:
        return out[:tokens, :, :rank].astype(q_latent.dtype), None
    real = jnp.arange(tokens) < cu_q_lens[num_seqs[1]]
    return out[:tokens, :, :rank], jnp.where(real[:, None], out[:tokens, :, rank], -jnp.inf)


def _decode(attend_rows, q, out, kv_lens, page_table, num_seqs):
    """`out` with the rows of the sequences of one query token, a few sequences at a time."""
    count = DECODE_SEQUENCES
    kv_lens, page_table = jnp.pad(kv_lens, (0, count)), jnp.pad(page_table, ((0, count), (0, 0)))

    def body(i, out):
        start = i * count
        real = start + jnp.arange(count) < num_seqs[0]
        position = jnp.where(real, lax.dynamic_slice_in_dim(kv_lens, start, count), 0) - 1
        table = lax.dynamic_slice_in_dim(page_table, start, count)
        rows = attend_rows(lax.dynamic_slice_in_dim(q, start, count)[:, None], position[:, None], table)
        return lax.dynamic_update_slice_in_dim(out, rows[:, 0], start, 0)

    return lax.fori_loop(0, (num_seqs[0] + count - 1) // count, body, out)


def _prefill(attend_rows, q, out, kv_lens, page_table, cu_q_lens, num_seqs, block):
    """`out` with the rows of the remaining sequences, `block` queries of one sequence at a time.

    Blocks go in the order of their tokens, so that what one writes past its sequence's end the next overwrites,
    and past the last sequence it writes zeros.
    """
    sequence = jnp.arange(kv_lens.shape[0])
    todo = (sequence >= num_seqs[0]) & (sequence < num_seqs[1])
    lens = jnp.where(todo, jnp.diff(cu_q_lens), 0)
    ends = jnp.cumsum((lens + block - 1) // block)

    def body(i, out):
        s = jnp.searchsorted(ends, i, side="right")
        offset = (i - ends[s] + (lens[s] + block - 1) // block) * block + jnp.arange(block)
        start = cu_q_lens[s] + offset[0]
        position = jnp.where(offset < lens[s], kv_lens[s] - lens[s] + offset, -1)
        queries = lax.dynamic_slice_in_dim(q, start, block)
        rows = attend_rows(queries[None], position[None], page_table[s][None])
        return lax.dynamic_update_slice_in_dim(out, rows[0], start, 0)

    return lax.fori_loop(0, ends[-1], body, out)


def _attend_rows(
    q: Float[Array, "N Q H R"],
    position: Int[Array, "N Q"],
    pool: Float[Array, "L P p R"],
    kv_scales: Float[Array, "L P 2 p"] | None,
    layer: Int[Array, ""],
    page_table: Int[Array, "N B"],
    *,
    scale: float,
    rank: int,
    slots: SlotShard,
) -> Float[Array, "N Q H Rl+1"]:
    """Attention of query groups that share a page table, with the log-sum-exp as its last column.

    Rows of position -1 come out as zeros.
    """
    (n, queries, heads, width), blocks, page_size = q.shape, page_table.shape[1], pool.shape[2]
    page = slots.page(page_size)
    pages = min(blocks, -(-CHUNK_TOKENS // page_size))
    scaled = q.astype(jnp.float32) * scale
    last = jnp.max(position, axis=1)

    def body(i, carry):
        peak, total, acc = carry
        block = i * pages + jnp.arange(pages)
        held = block * page <= last[:, None]
        ids = jnp.where(held, page_table[:, jnp.minimum(block, blocks - 1)], 0)
        keys = pool[layer, ids, :, :width].reshape(n, pages * page_size, width).astype(jnp.float32)
        if kv_scales is not None:
            by_latent, by_rope = jnp.moveaxis(kv_scales[layer, ids], 2, 0).reshape(2, n, -1, 1)
            keys = jnp.concatenate([keys[..., :rank] * by_latent, keys[..., rank:] * by_rope], axis=-1)
        slot = slots.index * page_size + jnp.arange(page_size)
        key = (block[:, None] * page + slot[None]).reshape(-1)
        keys = jnp.where((key <= last[:, None])[..., None], keys, 0)
        seen = (key <= position[..., None])[:, :, None]
        scores = jnp.where(seen, jnp.einsum("nqhr,ncr->nqhc", scaled, keys, precision="highest"), LOWEST)
        top = jnp.maximum(peak, scores.max(-1))
        weights = jnp.where(seen, jnp.exp(scores - top[..., None]), 0)
        fade = jnp.exp(peak - top)
        values = jnp.einsum("nqhc,ncr->nqhr", weights, keys[..., :rank], precision="highest")
        return top, total * fade + weights.sum(-1), acc * fade[..., None] + values

    shape = (n, queries, heads)
    carry = (jnp.full(shape, LOWEST), jnp.zeros(shape), jnp.zeros((*shape, rank)))
    carry = tuple(vary_like(part, q, position, pool, kv_scales, layer, page_table, slots) for part in carry)
    steps = jnp.max(last) // (pages * page) + 1
    peak, total, acc = lax.fori_loop(0, steps, body, carry)
    out = acc / jnp.where(total > 0, total, 1)[..., None]
    out = jnp.concatenate([out, log_sum(peak, total)[..., None]], axis=-1)
    return jnp.where((position >= 0)[..., None, None], out, 0)

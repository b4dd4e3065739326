"""Ragged paged attention in plain XLA: what the kernels are compared with, and the implementation for CPU.

Memory is bounded by one chunk of keys and values, whatever the context: softmax is taken online, in float32,
over chunks of pages (Milakov and Gimelshein 2018). Sequences with one query token are done together; the
rest is cut into blocks of queries of one sequence each.
"""

from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.common.quantised_pool import write_scales
from pallas_kernels.common.slot_shard import SlotShard, log_sum, whole_pages
from pallas_kernels.common.token_places import token_places
from pallas_kernels.common.varying import vary_like
from pallas_kernels.ragged_paged_attention.masks import first_visible
from pallas_kernels.ragged_paged_attention.values import interleave, interleave_quantised

LOWEST = -1e30
DECODE_TOKENS = 128
PREFILL_TOKENS = 256
SMALL_BLOCK, LARGE_BLOCK = 8, 128


def ragged_paged_attention(
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    kv_pool: Array,
    layer: Int[Array, ""],
    kv_lens: Int[Array, " S"],
    page_table: Int[Array, "S B"],
    cu_q_lens: Int[Array, " S+1"],
    num_seqs: Int[Array, " 2"],
    *,
    scale: float,
    window: int | None,
    chunk: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " H"] | None,
    k_scale: float | None,
    v_scale: float | None,
    max_q_len: int | None,
    slots: SlotShard | None = None,
    kv_scales: Float[Array, "L P 2K p"] | None = None,
) -> tuple[Array, ...]:
    """As `api.ragged_paged_attention`, whose contract it is."""
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    shard = slots or whole_pages()
    page, slot = token_places(tokens, kv_pool.shape[2], kv_lens, page_table, cu_q_lens, num_seqs, shard)
    if kv_scales is None:
        rows = interleave(k, v, kv_pool, k_scale, v_scale)
    else:
        rows, new_scales = interleave_quantised(k, v, kv_pool)
        kv_scales = write_scales(kv_scales, new_scales, layer, page, slot)
    kept = jnp.where(page < 0, kv_pool.shape[1], page)
    kv_pool = kv_pool.at[jnp.broadcast_to(layer, page.shape), kept, slot].set(rows, mode="drop")
    attend = partial(
        _attend,
        kv_pool,
        kv_scales,
        layer,
        kv_heads=kv_heads,
        window=window,
        chunk=chunk,
        soft_cap=soft_cap,
        sinks=None if sinks is None else sinks.astype(jnp.float32).reshape(kv_heads, -1),
        v_scale=v_scale,
        slots=shard,
    )
    factor = scale if k_scale is None else scale * k_scale
    grouped = (q.astype(jnp.float32) * factor).reshape(tokens, kv_heads, heads // kv_heads, dim)
    out = _decode(attend, grouped, kv_lens, page_table, num_seqs)
    if max_q_len != 1:
        longest = min(tokens, max_q_len or tokens)
        block = min(longest, SMALL_BLOCK if tokens <= SMALL_BLOCK * kv_lens.shape[0] else LARGE_BLOCK)
        out = _prefill(attend, grouped, kv_lens, page_table, cu_q_lens, num_seqs, block, out)
    out = out[:tokens].reshape(tokens, heads, dim + 1)
    pools = (kv_pool,) if kv_scales is None else (kv_pool, kv_scales)
    if slots is None:
        return out[..., :dim].astype(q.dtype), *pools
    real = jnp.arange(tokens) < cu_q_lens[num_seqs[1]]
    return out[..., :dim], jnp.where(real[:, None], out[..., dim], -jnp.inf), *pools


def _decode(attend, q, kv_lens, page_table, num_seqs):
    """Output rows of the leading sequences with one query token, zeros elsewhere; at least S rows."""
    sequences = kv_lens.shape[0]
    q = jnp.pad(q, ((0, max(0, sequences - q.shape[0])), (0, 0), (0, 0), (0, 0)))
    lens = jnp.where(jnp.arange(sequences) < num_seqs[0], kv_lens, 0)
    out = attend(q[:sequences, None], lens[:, None] - 1, page_table, tokens=DECODE_TOKENS)
    return jnp.pad(out[:, 0], ((0, q.shape[0] - sequences), (0, 0), (0, 0), (0, 0)))


def _prefill(attend, q, kv_lens, page_table, cu_q_lens, num_seqs, block_q, out):
    """`out` with the rows of the sequences after the first num_seqs[0] too, `block_q` queries at a time."""
    sequence = jnp.arange(kv_lens.shape[0])
    todo = (sequence >= num_seqs[0]) & (sequence < num_seqs[1])
    lens = jnp.where(todo, jnp.diff(cu_q_lens), 0)
    ends = jnp.cumsum((lens + block_q - 1) // block_q)
    size = out.shape[0]
    q = jnp.pad(q, ((0, size + block_q - q.shape[0]), (0, 0), (0, 0), (0, 0)))

    def body(i, out):
        s = jnp.searchsorted(ends, i, side="right")
        first_block = ends[s] - (lens[s] + block_q - 1) // block_q
        offset = (i - first_block) * block_q + jnp.arange(block_q)
        start = cu_q_lens[s] + offset[0]
        position = jnp.where(offset < lens[s], kv_lens[s] - lens[s] + offset, -1)
        queries = lax.dynamic_slice_in_dim(q, start, block_q)
        rows = attend(queries[None], position[None], page_table[s][None], tokens=PREFILL_TOKENS)
        return lax.dynamic_update_slice_in_dim(out, rows[0], start, 0)

    out = jnp.pad(out, ((0, block_q), (0, 0), (0, 0), (0, 0)))
    return lax.fori_loop(0, ends[-1], body, out)[:size]


def _attend(
    pool,
    scales,
    layer,
    q,
    position,
    page_table,
    *,
    tokens,
    kv_heads,
    window,
    chunk,
    soft_cap,
    sinks,
    v_scale,
    slots,
):
    """Attention of query groups that share a page table.

    Args:
      q: `[N, Q, K, G, D]`, float32, scaled. position: `[N, Q]`, -1 for rows to be left at zero.
      page_table: `[N, B]`. tokens: how many keys to hold at a time, rounded up to pages.

    Returns:
      `[N, Q, K, G, D + 1]` in float32; the last column is the logarithm of the sum of exponentials.
    """
    page_size, blocks, dim = pool.shape[2], page_table.shape[1], q.shape[-1]
    page = slots.page(page_size)
    pages = min(blocks, -(-tokens // page_size))
    first = jnp.where(position >= 0, first_visible(position, window, chunk), jnp.iinfo(jnp.int32).max)
    start = jnp.min(first, axis=1) // page
    stop = jnp.max(position, axis=1) // page + 1
    steps = jnp.max((stop - start + pages - 1) // pages)

    def body(i, carry):
        peak, total, acc = carry
        block = start[:, None] + i * pages + jnp.arange(pages)[None]
        held = block < stop[:, None]
        ids = jnp.take_along_axis(page_table, jnp.clip(block, 0, blocks - 1), axis=1)
        ids = jnp.where(held, ids, 0)
        kv = pool[layer, ids].reshape(q.shape[0], pages * page_size, kv_heads, 2, -1)[..., :dim].astype(jnp.float32)
        if scales is not None:
            kv = kv * scales[layer, ids].swapaxes(2, 3).reshape(*kv.shape[:-1], 1)
        slot = slots.index * page_size + jnp.arange(page_size)
        key = (block[:, :, None] * page + slot[None, None]).reshape(q.shape[0], -1)
        seen = (key[:, None] >= first[:, :, None]) & (key[:, None] <= position[:, :, None])
        values = jnp.where(seen.any(1)[:, :, None, None], kv[..., 1, :], 0)
        scores = jnp.einsum("nqkgd,nckd->nkgqc", q, kv[..., 0, :])
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        seen = seen[:, None, None]
        scores = jnp.where(seen, scores, LOWEST)
        top = jnp.maximum(peak, scores.max(-1))
        weights = jnp.where(seen, jnp.exp(scores - top[..., None]), 0)
        fade = jnp.exp(peak - top)
        acc = acc * fade[..., None] + jnp.einsum("nkgqc,nckd->nkgqd", weights, values)
        return top, total * fade + weights.sum(-1), acc

    n, queries, _, group, _ = q.shape
    shape = (n, kv_heads, group, queries)
    carry = (jnp.full(shape, LOWEST), jnp.zeros(shape), jnp.zeros((*shape, dim)))
    carry = tuple(vary_like(x, q, pool, scales, position, page_table, layer, slots) for x in carry)
    peak, total, acc = lax.fori_loop(0, steps, body, carry)
    if sinks is not None:
        sink = jnp.broadcast_to(jnp.where(slots.index == 0, sinks, LOWEST)[None, :, :, None], shape)
        top = jnp.maximum(peak, sink)
        fade = jnp.exp(peak - top)
        total = total * fade + jnp.where(sink > LOWEST, jnp.exp(sink - top), 0)
        peak, acc = top, acc * fade[..., None]
    out = acc / jnp.where(total > 0, total, 1)[..., None]
    out = out if v_scale is None else out * v_scale
    out = jnp.concatenate([out, log_sum(peak, total)[..., None]], axis=-1).transpose(0, 3, 1, 2, 4)
    return jnp.where((position >= 0)[:, :, None, None, None], out, 0)

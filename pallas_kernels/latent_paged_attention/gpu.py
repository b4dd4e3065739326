"""Latent paged attention on GPU (Triton).

A program has a block of queries and heads of one sequence and a share of its keys; the shares of a sequence with one
query token are merged afterwards by their log-sum-exp.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.common.backends import UnsupportedError
from pallas_kernels.common.slot_shard import SlotShard, log_sum, whole_pages
from pallas_kernels.common.varying import result_like, vary_together
from pallas_kernels.latent_paged_attention.blocks import GpuBlocks, Shape, gpu_blocks
from pallas_kernels.latent_paged_attention.items import Items, decode_items, prefill_items

LOWEST = -1e30
PROGRAMS = 264
"""Programs that fill an H100: two for each of its 132 multiprocessors."""


@dataclass(frozen=True)
class Plan:
    """What is fixed when the kernel is compiled."""

    queries: int  # of a program
    heads: int  # of a program, a power of two
    all_heads: int
    splits: int
    pages: int  # of a layer
    page_size: int  # slots that the pool has of a page
    shards: int  # pools over which the slots of a page are split
    rank: int
    rope: int
    scale: float
    keys: int  # of a step
    warps: int
    stages: int


def refusal(pool: Array) -> str | None:
    """Why the kernel cannot run these arguments, None where it can."""
    if pool.size // pool.shape[3] >= 2**31:
        return f"a pool of {pool.shape} has 2**31 rows or more; use fewer pages."
    return None


def attend(
    q_latent: Float[Array, "T H Rl"],
    q_rope: Float[Array, "T H Rr"],
    pool: Float[Array, "L P p R"],
    layer: Int[Array, ""],
    kv_lens: Int[Array, " S"],
    page_table: Int[Array, "S B"],
    cu_q_lens: Int[Array, " S+1"],
    num_seqs: Int[Array, " 2"],
    *,
    scale: float,
    max_q_len: int | None,
    slots: SlotShard | None = None,
    kv_scales: Float[Array, "L P 2 p"] | None = None,
    interpret: bool = False,
    blocks: GpuBlocks | None = None,
) -> tuple[Float[Array, "T H Rl"], Float[Array, "T H"] | None]:
    """Output and, where the pool is a shard, log-sum-exp of the op, for a pool that already holds the new tokens."""
    shard = slots or whole_pages()
    tokens, heads, rank = q_latent.shape
    rope = q_rope.shape[2]
    shape = Shape(heads, rank, _size(rank) + _size(rope), pool.shape[2], pool.dtype.name)
    blocks = blocks or gpu_blocks(shape)
    if reason := blocks.refusal(shape):
        raise UnsupportedError(f"latent_paged_attention: {reason}")
    head_block = blocks.head_block(shape)
    plan = Plan(
        queries=max(1, 16 // head_block),
        heads=head_block,
        all_heads=heads,
        splits=1,
        pages=pool.shape[1],
        page_size=pool.shape[2],
        shards=shard.count,
        rank=rank,
        rope=rope,
        scale=scale,
        keys=blocks.keys,
        warps=blocks.warps,
        stages=blocks.stages,
    )
    dtype = q_latent.dtype if slots is None else jnp.float32
    pools = (pool,) if kv_scales is None else (pool, kv_scales)
    run = functools.partial(_attend_items, pools, layer, shard.index, page_table, dtype=dtype, interpret=interpret)
    items = decode_items(kv_lens, num_seqs, tokens)
    sequences = items.sequence.shape[0]
    programs = sequences * pl.cdiv(heads, head_block)
    splits = min(32, pl.next_power_of_2(max(1, PROGRAMS // programs)))
    found = run(q_latent[:sequences], q_rope[:sequences], items, _with(plan, splits=splits))
    found = [jnp.pad(x, ((0, tokens - sequences), *[(0, 0)] * (x.ndim - 1))) for x in found]

    def with_prefill(found):
        queries = max(plan.queries, blocks.rows // head_block)
        items, _ = prefill_items(kv_lens, cu_q_lens, num_seqs, tokens, queries)
        out, lse = run(q_latent, q_rope, items, _with(plan, queries=queries))
        decoded = jnp.arange(tokens) < num_seqs[0]
        return [jnp.where(decoded[:, None, None], found[0], out), jnp.where(decoded[:, None], found[1], lse)]

    if max_q_len != 1:
        found = jax.lax.cond(num_seqs[1] > num_seqs[0], with_prefill, lambda found: found, found)
    real = jnp.arange(tokens) < cu_q_lens[num_seqs[1]]
    out = jnp.where(real[:, None, None], found[0], 0)
    return out, None if slots is None else jnp.where(real[:, None], found[1], -jnp.inf)


def _size(dim: int) -> int:
    """Lanes of a tile that holds `dim`: a power of two, as Triton asks, of at least 16."""
    return max(16, pl.next_power_of_2(dim))


def _with(plan: Plan, **changes) -> Plan:
    return Plan(**{**vars(plan), **changes})


def _attend_items(
    pools: tuple[Array, ...],
    layer: Int[Array, ""],
    shard: Int[Array, ""],
    page_table: Int[Array, "S B"],
    q_latent: Array,
    q_rope: Array,
    items: Items,
    plan: Plan,
    *,
    dtype: DTypeLike,
    interpret: bool,
) -> list[Array]:
    """Output and log-sum-exp of the items' tokens; what other rows hold is undefined."""
    tokens, heads, rank = q_latent.shape
    rows = tokens * heads
    meta = jnp.stack([layer, items.count, shard]).astype(jnp.int32)
    operands = vary_together(
        meta,
        *items[:4],
        page_table,
        q_latent.reshape(rows, rank),
        q_rope.reshape(rows, -1),
        pools[0].reshape(-1, pools[0].shape[3]),
        *(scales.reshape(-1) for scales in pools[1:]),
    )
    shapes = [(plan.splits * rows, rank), (plan.splits * rows,), (plan.splits * rows,)]
    acc, peak, total = pl.pallas_call(
        functools.partial(_kernel, plan=plan),
        out_shape=[result_like(shape, jnp.float32, *operands) for shape in shapes],
        grid=(items.sequence.shape[0], pl.cdiv(heads, plan.heads), plan.splits),
        compiler_params=plgpu.CompilerParams(num_warps=plan.warps, num_stages=plan.stages),
        interpret=interpret,
        name=f"latent_paged_attention_{plan.queries}",
    )(*operands)
    acc, peak, total = (x.reshape(plan.splits, tokens, heads, *x.shape[1:]) for x in (acc, peak, total))
    top = peak.max(0)
    weight = jnp.exp(peak - top[None])
    total = (total * weight).sum(0)
    merged = (acc * weight[..., None]).sum(0) / jnp.where(total > 0, total, 1)[..., None]
    return [merged.astype(dtype), log_sum(top, total)]


def _kernel(
    meta,  # [3]: layer, number of items, shard
    sequences,
    tokens,
    firsts,
    lasts,
    table,
    q_latent,
    q_rope,
    pool,
    *refs,  # the scales [L * P * 2 * p] of a quantised pool; then numerators, peaks and sums of the splits
    plan,
):
    *scales, acc_out, peak_out, total_out = refs
    item, head_block, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)

    @pl.when(item < meta[1])
    def _():
        row = jnp.arange(plan.queries * plan.heads, dtype=jnp.int32)
        query, head = row // plan.heads, head_block * plan.heads + row % plan.heads
        position = firsts[item] + query
        last = lasts[item]
        real = (position <= last) & (head < plan.all_heads)
        q_row = (tokens[item] + query) * plan.all_heads + head
        lane, rope_lane = (jnp.arange(_size(dim), dtype=jnp.int32) for dim in (plan.rank, plan.rope))
        is_latent, is_rope = lane < plan.rank, rope_lane < plan.rope
        queries = [_load(q_latent, q_row, lane, real, is_latent), _load(q_rope, q_row, rope_lane, real, is_rope)]
        slots = SlotShard(meta[2], plan.shards)
        end = slots.below(last + 1, plan.page_size)
        steps = (end + plan.keys - 1) // plan.keys
        share = (steps + plan.splits - 1) // plan.splits

        def step(i, state):
            key = i * plan.keys + jnp.arange(plan.keys, dtype=jnp.int32)
            held = key < end
            page = plgpu.load(table.at[sequences[item], key // plan.page_size], mask=held, other=0)
            page = meta[0] * plan.pages + page
            slot = page * plan.page_size + key % plan.page_size
            place = 2 * page * plan.page_size + key % plan.page_size
            places = (place, place + plan.page_size)
            factors = [plgpu.load(ref.at[at], mask=held, other=0.0) for ref in scales for at in places]
            latent = _load(pool, slot, lane, held, is_latent)
            rope = _load(pool, slot, plan.rank + rope_lane, held, is_rope)
            seen = (slots.position(key, plan.page_size)[None, :] <= position[:, None]) & held[None, :]
            return _accumulate(queries, latent, rope, factors, seen, state, plan.scale)

        start = (jnp.full(row.shape, LOWEST), jnp.zeros(row.shape), jnp.zeros((row.shape[0], lane.shape[0])))
        stop = jnp.minimum(steps, (split + 1) * share)
        peak, total, acc = jax.lax.fori_loop(split * share, stop, step, start)
        place = split * q_latent.shape[0] + q_row
        plgpu.store(peak_out.at[place], peak, mask=real)
        plgpu.store(total_out.at[place], total, mask=real)
        plgpu.store(acc_out.at[_grid(place, lane)], acc, mask=_both(real, is_latent))


def _accumulate(queries, latent, rope, factors, seen, state, scale):
    """Folds one step of keys into the running maximum, sum and weighted values.

    `factors`: the scales of latent and rope, empty for a pool without.
    """
    peak, total, acc = state
    if factors:
        latent, rope = (x.astype(jnp.float32).astype(queries[0].dtype) for x in (latent, rope))
        by_latent, by_rope = factors
        scores = _dot(queries[0], latent, 1) * by_latent[None, :] + _dot(queries[1], rope, 1) * by_rope[None, :]
    else:
        scores = _dot(queries[0], latent, 1) + _dot(queries[1], rope, 1)
    scores = scores * scale
    scores = jnp.where(seen, scores, LOWEST)
    top = jnp.maximum(peak, jnp.max(scores, axis=1))
    weights = jnp.where(seen, jnp.exp(scores - top[:, None]), 0.0)
    fade = jnp.exp(peak - top)
    sums = total * fade + jnp.sum(weights, axis=1)
    weights = weights * factors[0][None, :] if factors else weights
    return top, sums, acc * fade[:, None] + _dot(weights.astype(latent.dtype), latent, 0)


def _dot(a: Array, b: Array, axis: int) -> Array:
    """Sum over the last axis of a and `axis` of b, in float32."""
    precision = jax.lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a.astype(b.dtype),
        b,
        (((1,), (axis,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _load(
    ref, row: Int[Array, " a"], lane: Int[Array, " b"], rows: Bool[Array, " a"], lanes: Bool[Array, " b"]
) -> Array:
    """Elements of rows and lanes, zero where either mask says no."""
    return plgpu.load(ref.at[_grid(row, lane)], mask=_both(rows, lanes), other=jnp.zeros((), ref.dtype))


def _grid(column: Array, row: Array) -> tuple[Array, Array]:
    shape = (column.shape[0], row.shape[0])
    return jax.lax.broadcast_in_dim(column, shape, (0,)), jax.lax.broadcast_in_dim(row, shape, (1,))


def _both(column: Array, row: Array) -> Array:
    a, b = _grid(column, row)
    return a & b

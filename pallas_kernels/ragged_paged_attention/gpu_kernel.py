"""The Triton kernels: one writes new keys and values to their pages, one attends a block of queries.

A program of the second has queries of one sequence that share a KV head, and a range of the sequence's keys.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.common.slot_shard import SlotShard, log_sum
from pallas_kernels.ragged_paged_attention.masks import first_visible

LOWEST = -1e30


@dataclass(frozen=True)
class Plan:
    """What is fixed when the kernels are compiled. Names in `_size` are powers of two, as Triton asks."""

    block_q: int
    keys: int  # of a step
    splits: int  # programs that share the keys of a sequence
    page_size: int  # slots that the pool has of a page
    pages: int  # of a layer
    shards: int  # pools over which the slots of a page are split
    heads: int
    kv_heads: int
    dim: int
    lanes: int  # of a row of the pool
    group_size: int
    dim_size: int
    window: int | None
    chunk: int | None
    soft_cap: float | None
    dot_dtype: str
    partial: bool  # stores numerator, peak and sum of each split, else the quotient
    lse: bool  # and its log-sum-exp
    scaled: bool  # the pool's scales come as data

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


def write_kernel(layer, pages, slots, new, _pool, pool, *, plan: Plan):
    """Token t of `new` [T, 2K * lanes] goes to `pool` [L * P * p, 2K * lanes]; page -1 marks padding."""
    token = pl.program_id(0)
    width = 2 * plan.kv_heads * plan.lanes
    size = pl.next_power_of_2(width)
    column = jnp.arange(size)
    page = pages[token]
    row = (layer[0] * plan.pages + page) * plan.page_size + slots[token]
    mask = (column < width) & (page >= 0)
    plgpu.store(pool.at[row, column], plgpu.load(new.at[token, column], mask=mask), mask=mask)


def attend_kernel(
    meta,  # [3]: layer, number of items, shard
    item_sequence,  # [N]
    item_offset,  # [N]
    kv_lens,  # [S]
    table,  # [S, B]
    cu_q_lens,  # [S + 1]
    sinks,  # [H], LOWEST where there are none
    q,  # [T * H, D], scaled
    pool,  # [L * P * p * 2K, lanes]
    *refs,
    plan: Plan,
):
    """Output rows of the item and KV head of this program.

    `refs`: where plan.scaled the scales [L * P * 2K * p], then what the outputs start from, then the outputs:
    where plan.partial, numerators [splits * T * H, D], peaks and sums [splits * T * H], all float32; else the
    output [T * H, D] and where plan.lse the log-sum-exp [T * H].
    """
    scales = refs[0] if plan.scaled else None
    outputs = refs[-3:] if plan.partial else refs[-2:] if plan.lse else refs[-1:]
    item, head, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    pl.when(item < meta[1])(
        lambda: _attend_item(
            meta[0],
            SlotShard(meta[2], plan.shards),
            item_sequence[item],
            item_offset[item],
            head,
            split,
            *(kv_lens, table, cu_q_lens, sinks, q, pool, scales, outputs),
            plan=plan,
        )
    )


def _attend_item(
    layer,
    slots,
    sequence,
    offset,
    head,
    split,
    kv_lens,
    table,
    cu_q_lens,
    sinks,
    q,
    pool,
    scales,
    outputs,
    *,
    plan,
):
    token, next_token = cu_q_lens[sequence], cu_q_lens[sequence + 1]
    count = jnp.minimum(plan.block_q, next_token - token - offset)
    start = kv_lens[sequence] - (next_token - token) + offset
    last = start + count - 1
    rows = plan.block_q * plan.group_size
    index = jnp.arange(rows, dtype=jnp.int32)
    query, member = lax.div(index, jnp.int32(plan.group_size)), lax.rem(index, jnp.int32(plan.group_size))
    real = (query < count) & (member < plan.group)
    q_head = head * plan.group + member
    q_row = (token + offset + query) * plan.heads + q_head
    lane = jnp.arange(plan.dim_size, dtype=jnp.int32)
    in_lane = lane < plan.dim

    def grid(column, row):
        shape = (column.shape[0], row.shape[0])
        return tuple(lax.broadcast_in_dim(x, shape, (axis,)) for axis, x in enumerate((column, row)))

    def both(column, row):
        a, b = grid(column, row)
        return a & b

    dot_dtype = jnp.dtype(plan.dot_dtype)
    precision = lax.Precision.HIGHEST if dot_dtype == jnp.float32 else None
    q_block = plgpu.load(q.at[grid(q_row, lane)], mask=both(real, in_lane), other=0.0).astype(dot_dtype)
    position = start + query
    low = first_visible(position, plan.window, plan.chunk)
    visible = slots.below(first_visible(start, plan.window, plan.chunk), plan.page_size)
    end = slots.below(last + 1, plan.page_size)
    first = visible - lax.rem(visible, jnp.int32(plan.keys))
    steps = lax.div(end - first + plan.keys - 1, jnp.int32(plan.keys))
    share = lax.div(steps + plan.splits - 1, jnp.int32(plan.splits))

    def step(i, carry):
        peak, total, acc = carry
        key = first + i * plan.keys + jnp.arange(plan.keys, dtype=jnp.int32)
        held = (key >= visible) & (key < end)
        page = plgpu.load(table.at[sequence, lax.div(key, jnp.int32(plan.page_size))], mask=held, other=0)
        page = layer * plan.pages + page
        slot = lax.rem(key, jnp.int32(plan.page_size))
        scale = (page * 2 * plan.kv_heads + 2 * head) * plan.page_size + slot
        slot = page * plan.page_size + slot
        row = (slot * plan.kv_heads + head) * 2
        mask = both(held, in_lane)
        zero = jnp.zeros((), pool.dtype)
        k = plgpu.load(pool.at[grid(row, lane)], mask=mask, other=zero)
        v = plgpu.load(pool.at[grid(row + 1, lane)], mask=mask, other=zero)
        scores = lax.dot_general(
            q_block,
            k.astype(jnp.float32).astype(dot_dtype),
            (((1,), (1,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        if scales is not None:
            scores = scores * plgpu.load(scales.at[scale], mask=held, other=0.0)[None, :]
        if plan.soft_cap is not None:
            scores = plan.soft_cap * _tanh(scores * (1.0 / plan.soft_cap))
        keys_2d, low_2d, position_2d = slots.position(key, plan.page_size)[None, :], low[:, None], position[:, None]
        seen = (keys_2d >= low_2d) & (keys_2d <= position_2d) & held[None, :]
        scores = jnp.where(seen, scores, LOWEST)
        top = jnp.maximum(peak, jnp.max(scores, axis=1))
        weights = jnp.where(seen, jnp.exp(scores - top[:, None]), 0.0)
        fade = jnp.exp(peak - top)
        sums = total * fade + jnp.sum(weights, axis=1)
        if scales is not None:
            weights = weights * plgpu.load(scales.at[scale + plan.page_size], mask=held, other=0.0)[None, :]
        part = lax.dot_general(
            weights.astype(dot_dtype),
            v.astype(jnp.float32).astype(dot_dtype),
            (((1,), (0,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        return top, sums, acc * fade[:, None] + part

    sink = plgpu.load(sinks.at[q_head], mask=member < plan.group, other=LOWEST)
    peak = jnp.where(split == 0, sink, jnp.full_like(sink, LOWEST))
    total = jnp.where(peak > LOWEST, 1.0, 0.0)
    acc = jnp.zeros((rows, plan.dim_size), jnp.float32)
    stop = jnp.minimum(steps, (split + 1) * share)
    peak, total, acc = lax.fori_loop(split * share, stop, step, (peak, total, acc))
    if plan.partial:
        place = split * (q.shape[0]) + q_row
        out, peaks, totals = outputs
        plgpu.store(peaks.at[place], peak, mask=real)
        plgpu.store(totals.at[place], total, mask=real)
        plgpu.store(out.at[grid(place, lane)], acc, mask=both(real, in_lane))
        return
    value = acc / jnp.where(total > 0, total, 1.0)[:, None]
    plgpu.store(outputs[0].at[grid(q_row, lane)], value.astype(outputs[0].dtype), mask=both(real, in_lane))
    if plan.lse:
        plgpu.store(outputs[1].at[q_row], log_sum(peak, total), mask=real)


def _tanh(x):
    """tanh by exp, which Triton has on every target."""
    return 1.0 - 2.0 / (jnp.exp(2.0 * x) + 1.0)

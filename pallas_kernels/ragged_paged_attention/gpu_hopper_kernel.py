"""The Mosaic GPU kernel of prefill on Hopper: a block of queries attends, its keys and values fetched ahead by TMA.

A program has the queries of one item that share a KV head: 64 rows (queries times heads of a group) for each of two
warpgroups. A third fetches keys and values, a page or a part of one a copy, into a ring of buffers that both read.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ragged_paged_attention.gpu_kernel import LOWEST
from pallas_kernels.ragged_paged_attention.masks import first_visible

UNSEEN = 2 * LOWEST
"""The score of a key that a row does not see: its weight is 0 even where the row's peak is `LOWEST`."""
COMPUTING = 2
"""Warpgroups that multiply."""
ROWS = 64
"""Rows of a warpgroup's product, as the instruction has them."""
LANES = 64
"""16-bit numbers of 128 bytes, the span over which shared memory is swizzled."""
TILED = (
    plgpu.TilingTransform((8, LANES)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(2 * LANES),  # pyright: ignore[reportAbstractUsage]
)


@dataclass(frozen=True)
class Plan:
    """What is fixed when the kernel is compiled."""

    keys: int  # of a step
    stages: int  # buffers of keys, and of values
    page_size: int
    pages: int  # of a layer
    group: int  # heads that share a KV head
    dim: int
    window: int | None
    chunk: int | None
    soft_cap: float | None
    interpret: bool

    @property
    def part(self) -> int:
        """Slots of a copy."""
        return min(self.page_size, self.keys)


def scratch(plan: Plan) -> tuple:
    """The last arguments of `attend_kernel`: shared memory and barriers."""
    ring = plgpu.SMEM((plan.stages, plan.keys, plan.dim), jnp.bfloat16, transforms=TILED)
    filled = plgpu.Barrier(num_arrivals=plan.keys // plan.part, num_barriers=plan.stages)
    return (
        plgpu.SMEM((COMPUTING, ROWS, plan.dim), jnp.bfloat16, transforms=TILED),
        *(ring, ring),
        plgpu.Barrier(num_barriers=COMPUTING),
        *(filled, filled),
        plgpu.Barrier(num_arrivals=COMPUTING, num_barriers=plan.stages),
        plgpu.Barrier(num_arrivals=COMPUTING),
    )


def attend_kernel(
    first_page,  # [1], of the layer
    item_sequence,  # [N]
    item_start,  # [N], position of an item's first query
    item_last,  # [N], of its last, less than the first where the item is padding
    table,  # [S, B]
    sinks,  # [K, 128] of the rows, float32, LOWEST where there are none
    q,  # [K, N * 128, D], scaled
    pool,  # [L * P, p, 2K, D]
    out,  # [K, N * 128, D]
    queries,  # [2, 64, D], later output
    keys,  # [stages, keys, D]
    values,  # [stages, keys, D]
    q_filled,
    k_filled,
    v_filled,
    emptied,
    cleared,
    *,
    plan: Plan,
):
    """Output rows of the item and KV head of this program; those of items that are padding stay unwritten."""
    item, head, role = (lax.axis_index(name) for name in ("item", "head", "role"))
    start, last = item_start[item], item_last[item]
    visible = first_visible(start, plan.window, plan.chunk)
    first = visible - lax.rem(visible, jnp.int32(plan.keys))
    steps = lax.div(last - first, jnp.int32(plan.keys)) + 1

    @pl.when((last >= start) & (role == COMPUTING))
    def _fetch():
        plgpu.set_max_registers(40, action="decrease")
        sequence = item_sequence[item]

        def fetch(step, _):
            buffer = lax.rem(step, jnp.int32(plan.stages))
            pl.when(step >= plan.stages)(lambda: plgpu.barrier_wait(emptied.at[buffer]))
            for at in range(0, plan.keys, plan.part):
                key = first + step * plan.keys + at
                # A step may reach past the keys in view, where the table has no pages: the nearest one serves.
                block = lax.div(jnp.clip(key, visible, last), jnp.int32(plan.page_size))
                page = first_page[0] + table[sequence, block]
                rows = pl.ds(pl.multiple_of(lax.rem(key, jnp.int32(plan.page_size)), plan.part), plan.part)
                for ring, filled, row in ((keys, k_filled, 2 * head), (values, v_filled, 2 * head + 1)):
                    place = ring.at[buffer, pl.ds(at, plan.part)]
                    plgpu.copy_gmem_to_smem(pool.at[page, rows, row], place, filled.at[buffer])
            return 0

        lax.fori_loop(0, steps, fetch, 0)

    @pl.when((last >= start) & (role < COMPUTING))
    def _compute():
        plgpu.set_max_registers(232, action="increase")
        mine = queries.at[role]
        place = pl.ds((item * COMPUTING + role) * ROWS, ROWS)
        plgpu.copy_gmem_to_smem(q.at[head, place], mine, q_filled.at[role])
        by_row = plgpu.Layout.WGMMA.reduce(1)
        row = role * ROWS + plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=by_row)
        position = start + lax.div(row, jnp.full_like(row, plan.group))
        low = first_visible(position, plan.window, plan.chunk)
        # What all rows see lies from the lowest that the last of them sees to the position of the first.
        all_low = first_visible(last, plan.window, plan.chunk)
        all_high = start + lax.div(role * ROWS, jnp.int32(plan.group))
        sink = plgpu.load(sinks.at[head, pl.ds(role * ROWS, ROWS)], layout=by_row, optimized=False)
        plgpu.barrier_wait(q_filled.at[role])

        def step(i, carry):
            peak, total, acc = carry
            key, buffer = first + i * plan.keys, lax.rem(i, jnp.int32(plan.stages))
            end = key + plan.keys - 1

            def narrowed(scores):
                column = key + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
                seen = (column <= _across(position, scores)) & (column >= _across(low, scores))
                return jnp.where(seen, scores, UNSEEN)

            plgpu.barrier_wait(k_filled.at[buffer])
            scores = _scores(mine, keys.at[buffer])
            if plan.soft_cap is not None:
                scores = plan.soft_cap * lax.tanh(scores * (1.0 / plan.soft_cap))
            scores = lax.cond((key >= all_low) & (end <= all_high), lambda x: x, narrowed, scores)
            top = jnp.maximum(peak, jnp.max(scores, axis=1))
            fade = jnp.exp(peak - top)
            weights = jnp.exp(scores - _across(top, scores))
            total = total * fade + jnp.sum(weights, axis=1)
            plgpu.barrier_wait(v_filled.at[buffer])

            @pl.when((key < visible) | (end > last))
            def _():
                pl.when(role == 0)(lambda: _clear(values.at[buffer], visible - key, last - key))
                plgpu.barrier_arrive(cleared)
                plgpu.barrier_wait(cleared)

            acc = _add_product(acc * _across(fade, acc), weights.astype(q.dtype), values.at[buffer], plan.interpret)
            plgpu.barrier_arrive(emptied.at[buffer])
            return top, total, acc

        acc = plgpu.layout_cast(jnp.zeros((ROWS, plan.dim), jnp.float32), plgpu.Layout.WGMMA)
        _, total, acc = lax.fori_loop(0, steps, step, (sink, jnp.where(sink > LOWEST, 1.0, 0.0), acc))
        mine[...] = (acc / _across(total, acc)).astype(mine.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(mine, out.at[head, place])
        plgpu.wait_smem_to_gmem(0)


def _across(column, like):
    """[rows] in every column of an array like `like`, [rows, columns]."""
    return lax.broadcast_in_dim(column, like.shape, (0,))


def _scores(queries, keys):
    """Products of rows in shared memory, [64, keys] float32."""

    def product(acc):
        plgpu.wgmma(acc, queries, keys.transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((queries.shape[0], keys.shape[0]), jnp.float32))


def _add_product(acc, weights, values, interpret: bool):
    """`acc + weights @ values`. jax's interpreter does not know the product whose left side lies in registers."""
    if interpret:
        held = values[...]
        plgpu.commit_smem()  # before the buffer is filled again; a product needs no such word
        return acc + jnp.dot(weights, held, preferred_element_type=jnp.float32)
    return pl.run_state(lambda ref: plgpu.wgmma(ref, weights, values))(plgpu.WGMMAAccumulatorRef.init(acc))


def _clear(values, low, last):
    """Zeroes the rows of `values` outside [low, last]: their weights are 0, but what is there may be no number."""
    for at in range(0, values.shape[1], LANES):
        part = values.at[:, pl.ds(at, LANES)]
        held = plgpu.load(part, layout=plgpu.Layout.WGMMA)
        row = plgpu.broadcasted_iota(jnp.int32, held.shape, 0, layout=plgpu.Layout.WGMMA)
        part[...] = jnp.where((row >= low) & (row <= last), held, jnp.zeros_like(held))
    plgpu.commit_smem()

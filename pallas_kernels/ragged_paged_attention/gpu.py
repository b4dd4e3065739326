"""Ragged paged attention on GPU: prepares the operands of the Triton kernels and launches them."""

from functools import partial

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.common.backends import UnsupportedError
from pallas_kernels.common.lazy import LazyModule
from pallas_kernels.common.quantised_pool import write_scales
from pallas_kernels.common.slot_shard import SlotShard, log_sum, whole_pages
from pallas_kernels.common.token_places import token_places
from pallas_kernels.common.varying import result_like, vary_together
from pallas_kernels.ragged_paged_attention.blocks import GpuBlocks, Shape, gpu_blocks, usual_gpu_blocks
from pallas_kernels.ragged_paged_attention.gpu_kernel import LOWEST, Plan, attend_kernel, write_kernel
from pallas_kernels.ragged_paged_attention.items import work_items
from pallas_kernels.ragged_paged_attention.values import interleave, interleave_quantised

gpu_hopper = LazyModule("pallas_kernels.ragged_paged_attention.gpu_hopper")
PROGRAMS = 264
"""Programs that fill an H100: two for each of its 132 multiprocessors."""
DECODE_WARPS = 4
MAX_ROWS = 2**31 - 1


def refusal(q: Array, k: Array, kv_pool: Array, page_table: Array) -> str | None:
    """Why the kernels cannot run these arguments, or None where they can."""
    if kv_pool.shape[-2] != 1:
        return f"pack is {kv_pool.shape[-2]}; a pool for GPU has 1."
    if kv_pool.size // kv_pool.shape[-1] > MAX_ROWS:
        return f"a pool of {kv_pool.shape} has more than {MAX_ROWS} rows; use fewer pages."
    if kv_pool.dtype.itemsize == 1 and 2**31 <= kv_pool.size <= 2**32:
        return (
            f"the end of an 8-bit pool of {kv_pool.size} bytes is out of reach: Triton code for 2 to 4 GiB "
            "has offsets of 32 bits with a sign; use fewer or more pages."
        )
    if q.shape[-1] > 256:
        return f"head dim {q.shape[-1]} is over 256, which do not fit in shared memory."
    return None


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
    interpret: bool = False,
    blocks: GpuBlocks | None = None,
) -> tuple[Array, ...]:
    """As `api.ragged_paged_attention`; `blocks` overrides the tuned block sizes.

    Raises:
      UnsupportedError: `blocks` do not fit. Where they were tuned for Mosaic GPU's prefill and only this cannot run the
        arguments, Triton's does, with blocks of its own.
    """
    tokens, heads, dim = q.shape
    group = heads // k.shape[1]
    shape = Shape(heads, k.shape[1], kv_pool.shape[-1], kv_pool.shape[2], kv_pool.dtype.name)
    asked, blocks = blocks, blocks or gpu_blocks(shape)
    if reason := blocks.refusal(shape):
        raise UnsupportedError(f"ragged_paged_attention: {reason}")
    longest = max_q_len or tokens
    mosaic = blocks.prefill == "mosaic" and max_q_len != 1
    if mosaic and (reason := gpu_hopper.refusal(q, group, longest, slots, interpret)):
        if asked:
            raise UnsupportedError(f"ragged_paged_attention: {reason}")
        mosaic, blocks = False, usual_gpu_blocks(shape)
    shard = slots or whole_pages()
    plan = Plan(
        block_q=1,
        keys=blocks.keys,
        splits=1,
        page_size=kv_pool.shape[2],
        pages=kv_pool.shape[1],
        shards=shard.count,
        heads=heads,
        kv_heads=k.shape[1],
        dim=dim,
        lanes=kv_pool.shape[-1],
        group_size=pl.next_power_of_2(group),
        dim_size=max(16, pl.next_power_of_2(dim)),
        window=window,
        chunk=chunk,
        soft_cap=soft_cap,
        dot_dtype="float32" if q.dtype == jnp.float32 else "bfloat16",
        partial=False,
        lse=slots is not None,
        scaled=kv_scales is not None,
    )
    places = token_places(tokens, kv_pool.shape[2], kv_lens, page_table, cu_q_lens, num_seqs, shard)
    if kv_scales is None:
        rows = interleave(k, v, kv_pool, k_scale, v_scale)
    else:
        rows, new_scales = interleave_quantised(k, v, kv_pool)
        kv_scales = write_scales(kv_scales, new_scales, layer, *places)
    kv_pool = _write(rows, kv_pool, layer, *places, plan, interpret)
    factor = scale if k_scale is None else scale * k_scale
    scaled = (q.astype(jnp.float32) * factor).astype(q.dtype).reshape(tokens * heads, dim)
    logits = jnp.full((heads,), LOWEST) if sinks is None else sinks.astype(jnp.float32)
    logits = jnp.where(shard.index == 0, logits, LOWEST)
    scales = [] if kv_scales is None else [kv_scales.reshape(-1)]
    operands = (kv_lens, page_table, cu_q_lens, logits, scaled, kv_pool.reshape(-1, plan.lanes), *scales)
    attend = partial(_attend, operands, layer, shard.index, interpret=interpret, blocks=blocks)
    found = [jnp.zeros((tokens * heads, dim), q.dtype)]
    if slots is not None:
        found = [jnp.zeros((tokens * heads, dim)), jnp.full((tokens * heads,), -jnp.inf)]
    found = attend(found, jnp.int32(0), num_seqs[0], decode_plan(plan, kv_lens.shape[0]))
    if mosaic:
        launch = partial(gpu_hopper.prefill, plan=plan, stages=blocks.stages, interpret=interpret)
        found = launch(operands[:4], scaled, kv_pool, layer, num_seqs, found[0])
    elif max_q_len != 1:
        found = attend(found, num_seqs[0], num_seqs[1], prefill_plan(plan, longest, blocks.rows))
    out = found[0].reshape(tokens, heads, dim)
    out = out if v_scale is None else (out.astype(jnp.float32) * v_scale).astype(out.dtype)
    pools = (kv_pool,) if kv_scales is None else (kv_pool, kv_scales)
    return out, *(lse.reshape(tokens, heads) for lse in found[1:]), *pools


def decode_plan(plan: Plan, sequences: int) -> Plan:
    """One query a program; the keys of a sequence are split over programs until these fill the device."""
    splits = min(32, pl.next_power_of_2(max(1, PROGRAMS // (sequences * plan.kv_heads))))
    return _replace(plan, group_size=max(16, plan.group_size), splits=splits, partial=True)


def prefill_plan(plan: Plan, longest: int, rows: int) -> Plan:
    """`rows` (queries times heads of a group) a program, or fewer where no sequence has as many."""
    block_q = max(1, min(rows // plan.group_size, pl.next_power_of_2(longest)))
    return _replace(plan, block_q=block_q, group_size=max(plan.group_size, 16 // block_q))


def _replace(plan: Plan, **changes) -> Plan:
    return Plan(**{**vars(plan), **changes})


def _write(rows, pool, layer, page, slot, plan, interpret):
    width = 2 * plan.kv_heads * plan.lanes
    flat = pool.reshape(-1, width)
    operands = vary_together(layer[None], page, slot, rows.reshape(-1, width), flat)
    written = pl.pallas_call(
        partial(write_kernel, plan=plan),
        out_shape=result_like(flat.shape, flat.dtype, *operands),
        grid=(rows.shape[0],),
        input_output_aliases={4: 0},
        compiler_params=plgpu.CompilerParams(num_warps=4),
        interpret=interpret,
        name="write_pages",
    )(*operands)
    return written.reshape(pool.shape)


def _attend(operands, layer, shard, found, first, last, plan, *, interpret, blocks):
    """`found` (output, and log-sum-exp of a shard) with the rows of the sequences in [first, last) filled in."""
    lengths, (sinks, q, *pools) = operands[:3], operands[3:]
    if plan.partial:  # of each sequence one token, which come first
        q = q[: lengths[0].shape[0] * plan.heads]
    rows, dim = q.shape
    sequence, offset, count = work_items(lengths[2], first, last, plan.block_q, rows // plan.heads)
    meta = jnp.stack([layer, count, shard]).astype(jnp.int32)
    start, warps = ([], DECODE_WARPS) if plan.partial else (found, blocks.warps)
    args = vary_together(meta, sequence, offset, *lengths, sinks, q, *pools, *start)
    shapes = [(x.shape, x.dtype) for x in start]
    if plan.partial:
        shapes = [((plan.splits * rows, *rest), jnp.float32) for rest in ((dim,), (), ())]
    result = pl.pallas_call(
        partial(attend_kernel, plan=plan),
        out_shape=[result_like(shape, dtype, *args) for shape, dtype in shapes],
        grid=(sequence.shape[0], plan.kv_heads, plan.splits),
        input_output_aliases={len(args) - len(start) + i: i for i in range(len(start))},
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=blocks.stages),
        interpret=interpret,
        name=f"ragged_paged_attention_{'decode' if plan.partial else 'prefill'}",
    )(*args)
    return _combine(result, plan, last, found) if plan.partial else result


def _combine(partial_results, plan, decode, found):
    """`found` with the quotient over all splits for the first `decode` tokens; others were not stored."""
    acc, peaks, totals = (x.reshape(plan.splits, -1, *x.shape[1:]) for x in partial_results)
    top = peaks.max(0)
    weight = jnp.exp(peaks - top[None])
    total = (totals * weight).sum(0)
    value = (acc * weight[..., None]).sum(0) / jnp.where(total > 0, total, 1.0)[:, None]
    rows = value.shape[0]
    mine = jnp.arange(rows) < decode * plan.heads
    out, *lse = found
    out = out.at[:rows].set(jnp.where(mine[:, None], value.astype(out.dtype), 0))
    return [out, *(x.at[:rows].set(jnp.where(mine, log_sum(top, total), -jnp.inf)) for x in lse)]

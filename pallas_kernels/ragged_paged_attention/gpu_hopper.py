"""Prefill on Hopper by Mosaic GPU: which arguments it takes, how they are laid out for its kernel, and its launch."""

from functools import partial

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.common.slot_shard import SlotShard
from pallas_kernels.common.tuning import device_name
from pallas_kernels.common.varying import result_like, vary_together
from pallas_kernels.ragged_paged_attention.blocks import HOPPER
from pallas_kernels.ragged_paged_attention.gpu_hopper_kernel import COMPUTING, ROWS, Plan, attend_kernel, scratch
from pallas_kernels.ragged_paged_attention.gpu_kernel import Plan as TritonPlan
from pallas_kernels.ragged_paged_attention.items import work_items

BLOCK = COMPUTING * ROWS
"""Rows of a program."""


def refusal(q: Array, group: int, longest: int, slots: SlotShard | None, interpret: bool) -> str | None:
    """Why the kernel cannot run these arguments, or None where it can; `GpuBlocks.refusal` speaks of the pool's shape.

    Args:
      q: `[T, H, D]`. group: heads that share a KV head. longest: most queries of a sequence. slots, interpret: as the
        operation has them.
    """
    if not hasattr(plgpu, "InterpretGPUParams"):
        return "Mosaic GPU needs jax 0.12 or later."
    if not interpret and device_name() not in HOPPER:
        return f"Mosaic GPU's kernel multiplies as Hopper does; the device is not one of {', '.join(HOPPER)}."
    if q.dtype != jnp.bfloat16:
        return f"Mosaic GPU's kernel multiplies bfloat16; q is {q.dtype}."
    if slots is not None:
        return "Mosaic GPU's kernel takes whole pages; these are split over devices."
    if longest * group <= ROWS:
        return f"{longest} queries of {group} heads would leave half of the {BLOCK} rows of Mosaic GPU's kernel empty."
    return None


def prefill(
    batch: tuple[Array, ...],
    q: Float[Array, "T*H D"],
    kv_pool: Float[Array, "L P p 2K 1 D"],
    layer: Int[Array, ""],
    num_seqs: Int[Array, " 2"],
    found: Float[Array, "T*H D"],
    *,
    plan: TritonPlan,
    stages: int,
    interpret: bool,
) -> list[Array]:
    """`found` with the rows of the sequences in [num_seqs[0], num_seqs[1]) filled in, alone in a list.

    Args:
      batch: kv_lens [S], page_table [S, B], cu_q_lens [S + 1] and a sink a head [H] in float32, `LOWEST` where there
        are none. q: scaled; it, the pool and the result are bfloat16. kv_pool: with the new tokens. plan: of the
        operation's other kernels.
    """
    kv_lens, page_table, cu_q_lens, sinks = batch
    fixed = ("keys", "page_size", "pages", "group", "dim", "window", "chunk", "soft_cap")
    kernel = Plan(**{name: getattr(plan, name) for name in fixed}, stages=stages, interpret=interpret)
    heads, dim = plan.heads, plan.dim
    tokens = q.shape[0] // heads
    kv_heads, block_q = plan.kv_heads, BLOCK // plan.group
    sequence, offset, count = work_items(cu_q_lens, num_seqs[0], num_seqs[1], block_q, tokens)
    items = sequence.shape[0]
    length = jnp.diff(cu_q_lens)[sequence]
    start = kv_lens[sequence] - length + offset
    here = jnp.where(jnp.arange(items) < count, jnp.minimum(block_q, length - offset), 0)
    query = jnp.arange(block_q)
    token = (cu_q_lens[sequence] + offset)[:, None] + query  # [N, block_q]
    token = jnp.where(query < here[:, None], token, tokens)

    rows = q.reshape(tokens, heads, dim).at[token].get(mode="fill", fill_value=0)
    rows = rows.reshape(items, block_q, kv_heads, plan.group, dim).transpose(2, 0, 1, 3, 4)
    rows = rows.reshape(kv_heads, items, block_q * plan.group, dim)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, BLOCK - rows.shape[2]), (0, 0))).reshape(kv_heads, -1, dim)
    of_rows = jnp.take(sinks.reshape(kv_heads, plan.group), jnp.arange(BLOCK) % plan.group, axis=1)
    first_page = (layer * plan.pages).astype(jnp.int32)[None]
    pool = kv_pool.reshape(-1, plan.page_size, 2 * kv_heads, dim)
    args = vary_together(first_page, sequence, start, start + here - 1, page_table, of_rows, rows, pool)
    out = plgpu.kernel(
        partial(attend_kernel, plan=kernel),
        out_type=result_like(rows.shape, rows.dtype, *args),
        scratch_types=scratch(kernel),
        grid=(items, kv_heads),
        grid_names=("item", "head"),
        num_threads=COMPUTING + 1,
        thread_name="role",
        kernel_name="ragged_paged_attention_prefill",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
    )(*args)
    out = out.reshape(kv_heads, items, BLOCK, dim)[:, :, : block_q * plan.group]
    out = out.reshape(kv_heads, items * block_q, plan.group, dim)
    place = jnp.full(tokens, -1).at[token.reshape(-1)].set(jnp.arange(items * block_q), mode="drop")
    mine = out[:, place].transpose(1, 0, 2, 3).reshape(found.shape)
    return [jnp.where(jnp.repeat(place >= 0, heads)[:, None], mine, found)]

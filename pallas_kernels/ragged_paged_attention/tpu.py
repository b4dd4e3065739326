"""Ragged paged attention on TPU: prepares the operands of the Mosaic kernel and launches it."""

from functools import partial

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.common.backends import UnsupportedError
from pallas_kernels.common.quantised_pool import refusal_on_tpu, write_scales
from pallas_kernels.common.slot_shard import SlotShard, whole_pages
from pallas_kernels.common.token_places import token_places
from pallas_kernels.common.varying import result_like, vary_together
from pallas_kernels.ragged_paged_attention.blocks import VECTOR_LIMIT, Shape, TpuBlocks, tpu_blocks
from pallas_kernels.ragged_paged_attention.items import work_items
from pallas_kernels.ragged_paged_attention.tpu_kernel import LANES, LOWEST, Plan, kernel
from pallas_kernels.ragged_paged_attention.values import interleave, interleave_quantised

SCALAR_MEMORY = 768 * 1024
"""Bytes of the page table that scalar memory takes; a TPU core has 1 MiB."""


def refusal(q: Array, k: Array, kv_pool: Array, page_table: Array, kv_scales: Array | None) -> str | None:
    """Why the kernel cannot run these arguments, or None where it can."""
    pack, lanes = kv_pool.shape[-2:]
    if kv_pool.dtype.name not in ("float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2"):
        return f"a pool of {kv_pool.dtype.name} is not handled; use float32, bfloat16, int8 or fp8."
    if pack * kv_pool.dtype.itemsize != 4:
        return f"pack is {pack}; a {kv_pool.dtype.name} pool needs {4 // kv_pool.dtype.itemsize} on TPU."
    if lanes % LANES:
        return f"pool rows have {lanes} lanes; make the pool with {-lanes % LANES} more (a multiple of {LANES})."
    if page_table.size * 4 > SCALAR_MEMORY:
        return (
            f"a page table of {page_table.shape} takes {page_table.size * 4} bytes of scalar memory, of "
            f"which {SCALAR_MEMORY} are for it; use larger pages or fewer sequences at once."
        )
    return refusal_on_tpu(kv_scales)


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
    interpret: bool | pltpu.InterpretParams = False,
    blocks: TpuBlocks | None = None,
) -> tuple[Array, ...]:
    """As `api.ragged_paged_attention`; `blocks` overrides the tuned block sizes."""
    tokens, heads, dim = q.shape
    kv_heads, lanes = k.shape[1], kv_pool.shape[-1]
    group = heads // kv_heads
    shape = Shape(heads, kv_heads, lanes, kv_pool.shape[2], kv_pool.dtype.name)
    blocks = blocks or tpu_blocks(shape, page_table.shape[1], max_q_len or tokens)
    if reason := blocks.refusal(shape):
        raise UnsupportedError(f"ragged_paged_attention: {reason}")
    shard = slots or whole_pages()
    factor = scale if k_scale is None else scale * k_scale
    rows = (q.astype(jnp.float32) * factor).reshape(tokens, kv_heads, group, 1, dim).swapaxes(0, 1)
    rows = jnp.pad(rows, ((0, 0), (0, blocks.block_q), (0, 0), (0, 0), (0, lanes - dim)))
    if kv_scales is None:
        new = interleave(k, v, kv_pool, k_scale, v_scale)
    else:
        new, new_scales = interleave_quantised(k, v, kv_pool)
        places = token_places(tokens, kv_pool.shape[2], kv_lens, page_table, cu_q_lens, num_seqs, shard)
        kv_scales = write_scales(kv_scales, new_scales, layer, *places)
    launch = partial(
        _launch,
        rows,
        new,
        scales=kv_scales,
        sinks=sinks,
        layer=layer,
        kv_lens=kv_lens,
        page_table=page_table,
        cu_q_lens=cu_q_lens,
        shard=shard.index,
        plan=partial(
            Plan,
            pages=blocks.pages,
            page_size=kv_pool.shape[2],
            table_width=page_table.shape[1],
            kv_heads=kv_heads,
            group=group,
            dim=lanes,
            shards=shard.count,
            lse=slots is not None,
            scaled=kv_scales is not None,
            pack=kv_pool.shape[4],
            window=window,
            chunk=chunk,
            soft_cap=soft_cap,
            pool_dtype=kv_pool.dtype.name,
            dot_dtype="float32" if q.dtype == jnp.float32 else "bfloat16",
            interpret=bool(interpret),
        ),
        interpret=interpret,
    )
    start = jnp.zeros((*rows.shape[:-1], lanes if slots is None else lanes + LANES))
    out, kv_pool = launch(start, kv_pool, first=jnp.int32(0), last=num_seqs[0], block_q=1)
    if max_q_len != 1:
        out, kv_pool = launch(out, kv_pool, first=num_seqs[0], last=num_seqs[1], block_q=blocks.block_q)
    out = out[:, :tokens, :, 0].swapaxes(0, 1).reshape(tokens, heads, -1)
    value = out[..., :dim] if v_scale is None else out[..., :dim] * v_scale
    pools = (kv_pool,) if kv_scales is None else (kv_pool, kv_scales)
    if slots is None:
        return value.astype(q.dtype), *pools
    real = jnp.arange(tokens) < cu_q_lens[num_seqs[1]]
    return value, jnp.where(real[:, None], out[..., lanes], -jnp.inf), *pools


def _launch(
    q,
    new,
    out,
    pool,
    *,
    scales,
    sinks,
    layer,
    kv_lens,
    page_table,
    cu_q_lens,
    shard,
    first,
    last,
    block_q,
    plan,
    interpret,
):
    """`out` and `pool` after the sequences in [first, last), `block_q` queries at a time."""
    plan = plan(block_q=block_q)
    sequence, offset, count = work_items(cu_q_lens, first, last, block_q, q.shape[1])
    start = jnp.full(plan.kv_heads * plan.group, LOWEST) if sinks is None else sinks.astype(jnp.float32)
    start = jnp.where(shard == 0, start, LOWEST)
    start = jnp.tile(start.reshape(plan.kv_heads, plan.group, 1), (1, block_q, LANES))
    meta = jnp.stack([layer, first, last, count, shard]).astype(jnp.int32)
    scalars = (meta, sequence, offset, kv_lens, page_table.reshape(-1), cu_q_lens)
    read = (start, q, new) if scales is None else (start, scales, q, new)
    operands = vary_together(*scalars, *read, pool, out)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    queries, results = (
        pltpu.VMEM((2, plan.kv_heads, block_q, plan.group, 1, lanes), jnp.float32)
        for lanes in (q.shape[-1], out.shape[-1])
    )
    state = pltpu.VMEM((plan.kv_heads, plan.rows, LANES), jnp.float32)
    return pl.pallas_call(
        partial(kernel, plan=plan),
        out_shape=tuple(result_like(x.shape, x.dtype, *operands) for x in (out, pool)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pltpu.VMEM), *[anywhere] * (len(read) + 1)],
            out_specs=(anywhere, anywhere),
            scratch_shapes=[
                *([] if scales is None else [pltpu.VMEM((2, plan.pages, *scales.shape[2:]), jnp.float32)]),
                pltpu.VMEM((2, plan.pages, *pool.shape[2:]), pool.dtype),
                queries,
                results,
                state,
                state,
                pltpu.VMEM((plan.kv_heads, plan.rows, plan.dim), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA(()),
                pltpu.SemaphoreType.DMA(()),
            ],
        ),
        input_output_aliases={len(operands) - 2: 1, len(operands) - 1: 0},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VECTOR_LIMIT),
        interpret=interpret,
        name=f"ragged_paged_attention_{'decode' if block_q == 1 else 'prefill'}",
    )(*operands)

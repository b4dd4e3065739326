"""Latent paged attention on TPU (Mosaic).

One block of queries after another, all heads together; for each, its pages stream from HBM in chunks through two
buffers, and the first chunk of the next block is fetched while the last of this one is worked on. Softmax is online.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.common.backends import UnsupportedError
from pallas_kernels.common.quantised_pool import LIMITS, refusal_on_tpu
from pallas_kernels.common.slot_shard import SlotShard, log_sum, whole_pages
from pallas_kernels.common.varying import result_like, vary_together
from pallas_kernels.latent_paged_attention.blocks import LANES, VECTOR_LIMIT, Shape, TpuBlocks, tpu_blocks
from pallas_kernels.latent_paged_attention.items import Items, decode_items, prefill_items
from pallas_kernels.ragged_paged_attention.words import decode_byte

LOWEST = -1e30


def refusal(q_latent: Array, pool: Array, kv_scales: Array | None) -> str | None:
    """Why the kernel cannot run these arguments, None where it can."""
    if pool.dtype.name not in ("float32", "bfloat16", *LIMITS):
        return f"pools must be float32, bfloat16, {' or '.join(LIMITS)}, got {pool.dtype.name}."
    if pool.shape[3] % LANES:
        return f"the pool's last axis ({pool.shape[3]}) must be a multiple of {LANES}; pad the pool."
    if kv_scales is not None and q_latent.shape[2] % LANES:
        return f"the latent rank of a pool with scales must be a multiple of {LANES}, got {q_latent.shape[2]}."
    tile = 32 // pool.dtype.itemsize
    if pool.shape[2] % tile:
        return f"pages of {pool.dtype.name} must hold a multiple of {tile} positions, got {pool.shape[2]}."
    return refusal_on_tpu(kv_scales)


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
    slots: SlotShard | None = None,
    kv_scales: Float[Array, "L P 2 p"] | None = None,
    interpret=False,
    blocks: TpuBlocks | None = None,
) -> tuple[Float[Array, "T H Rl"], Float[Array, "T H"] | None]:
    """Output and, where the pool is a shard, log-sum-exp of the op, for a pool that already holds the new tokens."""
    tokens, heads, rank = q_latent.shape
    dtype = pool.dtype if kv_scales is None else q_latent.dtype
    width = pool.shape[3]

    def beside(latent: Array, rope: Array) -> Array:
        """Both parts of queries beside each other, as wide as a row of the pool."""
        q = jnp.concatenate([latent, rope], axis=-1).astype(dtype)
        return jnp.pad(q, (*[(0, 0)] * (q.ndim - 1), (0, width - q.shape[-1])))

    # Those of all tokens at once are one of the largest temporaries of a prefill step (358 MB for DeepSeek V3 on v5p
    # without, 411 with them); but not where devices share the slots of pages (Kimi K2.5 on TPU7x: 615 and 514).
    whole = None if slots is None else beside(q_latent, q_rope)

    def queries(rows: slice | Array) -> Array:
        return beside(q_latent[rows], q_rope[rows]) if whole is None else whole[rows]

    shape = Shape(heads, rank, pool.shape[3], pool.shape[2], pool.dtype.name)
    blocks = blocks or tpu_blocks(shape, page_table.shape[1])
    if reason := blocks.refusal(shape):
        raise UnsupportedError(f"latent_paged_attention: {reason}")
    pools = [pool] if kv_scales is None else [pool, kv_scales]
    run = functools.partial(
        _attend_items,
        pools,
        layer,
        page_table,
        slots,
        heads=heads,
        rank=-(-rank // LANES) * LANES,  # values in whole lanes, of which the rest is dropped
        scale=scale,
        pages=blocks.pages,
        interpret=interpret,
    )
    decode = decode_items(kv_lens, num_seqs, tokens)
    sequences = decode.sequence.shape[0]
    found = run(queries(slice(sequences)), decode)

    def alone(found):
        return [jnp.pad(x, ((0, tokens - sequences), (0, 0), (0, 0))) for x in found]

    def with_prefill(found):
        size = blocks.queries(shape)
        items, row = prefill_items(kv_lens, cu_q_lens, num_seqs, tokens, size)
        token = items.first_token[:, None] + jnp.arange(size)
        grouped = queries(jnp.minimum(token, tokens - 1)).reshape(-1, size * heads, width)
        rows = [x.reshape(-1, heads, x.shape[-1])[row] for x in run(grouped, items)]
        decoded = (jnp.arange(sequences) < num_seqs[0])[:, None, None]
        first = [jnp.where(decoded, old, new[:sequences]) for old, new in zip(found, rows, strict=True)]
        return [jax.lax.dynamic_update_slice(x, part, (0, 0, 0)) for x, part in zip(rows, first, strict=True)]

    found = alone(found) if max_q_len == 1 else jax.lax.cond(num_seqs[1] > num_seqs[0], with_prefill, alone, found)
    real = (jnp.arange(tokens) < cu_q_lens[num_seqs[1]])[:, None, None]
    out = jnp.where(real, found[0][..., :rank], 0)
    if slots is None:
        return out.astype(q_latent.dtype), None
    return out, jnp.where(real, found[1], -jnp.inf)[..., 0]


def _attend_items(
    pools: list[Array],
    layer: Int[Array, ""],
    page_table: Int[Array, "S B"],
    slots: SlotShard | None,
    q: Float[Array, "I rows R"],
    items: Items,
    *,
    heads: int,
    rank: int,
    scale: float,
    pages: int,
    interpret,
) -> list[Float[Array, "I rows _"]]:
    """Attention of blocks of queries, `heads` rows to a query; of a shard the log-sum-exp `[I, rows, 1]` too."""
    pool, *scales = pools
    shard = slots or whole_pages()
    (count, rows, width), page_size = q.shape, pool.shape[2]
    blocks = page_table.shape[1]
    table = page_table[:, None]
    scalars = (
        jnp.stack([layer, shard.index]),
        items.count[None],
        items.sequence,
        items.first_position,
        items.last_position,
    )
    shapes = [((count, rows, rank), q.dtype)]
    if slots is not None:
        shapes = [((count, rows, rank), jnp.float32), ((count, rows, LANES), jnp.float32)]
    operands = vary_together(*scalars, table, table, q, *pools)

    def table_spec(ahead):
        def index(i, layer, count, sequence, *_):
            return sequence[jnp.minimum(i + ahead, sequence.shape[0] - 1)], 0, 0

        return pl.BlockSpec((None, 1, blocks), index, memory_space=pltpu.SMEM)

    plan = {"heads": heads, "rank": rank, "scale": scale, "pages": pages, "shards": shard.count}
    out, *sums = pl.pallas_call(
        functools.partial(_kernel, **plan, scaled=bool(scales)),
        out_shape=[result_like(*shape, *operands) for shape in shapes],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(count,),
            in_specs=[
                table_spec(0),
                table_spec(1),
                pl.BlockSpec((None, rows, width), lambda i, *_: (i, 0, 0)),
                *[pl.BlockSpec(memory_space=pl.ANY)] * len(pools),
            ],
            out_specs=[pl.BlockSpec((None, *shape[1:]), lambda i, *_: (i, 0, 0)) for shape, _ in shapes],
            scratch_shapes=[
                pltpu.VMEM((2, pages * page_size, width), pool.dtype),
                *[pltpu.VMEM((2, pages, *x.shape[2:]), x.dtype) for x in scales],
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.VMEM((rows, 1), jnp.float32),
                pltpu.VMEM((rows, 1), jnp.float32),
                pltpu.VMEM((rows, rank), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=VECTOR_LIMIT),
        interpret=interpret,
        name=f"latent_paged_attention_{rows // heads}",
    )(*operands)
    return [out, *(x[..., :1] for x in sums)]


def _kernel(
    meta_ref,
    count_ref,
    sequence_ref,
    first_ref,
    last_ref,
    table_ref,
    next_table_ref,
    q_ref,
    pool_ref,
    *rest,
    heads,
    rank,
    scale,
    pages,
    shards,
    scaled,
):
    del sequence_ref
    rest = list(rest)
    scales_ref, scale_buffer = (rest.pop(0), rest.pop(-6)) if scaled else (None, None)
    out_ref, *lse_ref, buffer_ref, arrived, slot_ref, peak_ref, total_ref, acc_ref = rest
    item, page_size, slots = pl.program_id(0), pool_ref.shape[2], SlotShard(meta_ref[1], shards)
    page = slots.page(page_size)
    chunk_tokens = pages * page_size
    layer, count = meta_ref[0], count_ref[0]

    def each_page(act, table, last, chunk, slot):
        """Starts or awaits the copies of those pages of a chunk that hold positions up to `last`."""

        def one(j, _):
            source = pool_ref.at[layer, table[0, chunk * pages + j]]
            target = buffer_ref.at[slot, pl.ds(pl.multiple_of(j * page_size, page_size), page_size)]
            act(pltpu.make_async_copy(source, target, arrived.at[slot]))
            if scales_ref is not None and scale_buffer is not None:
                source = scales_ref.at[layer, table[0, chunk * pages + j]]
                act(pltpu.make_async_copy(source, scale_buffer.at[slot, j], arrived.at[slot]))
            return _

        jax.lax.fori_loop(0, jnp.minimum(pages, last // page + 1 - chunk * pages), one, None)

    fetch = functools.partial(each_page, lambda copy: copy.start())
    settle = functools.partial(each_page, lambda copy: copy.wait())

    @pl.when((item == 0) & (count > 0))
    def _():
        slot_ref[0] = 0
        fetch(table_ref, last_ref[0], 0, 0)

    @pl.when(item < count)
    def _():
        first_slot, first, last = slot_ref[0], first_ref[item], last_ref[item]
        chunks = last // (page * pages) + 1
        peak_ref[...] = jnp.full_like(peak_ref, LOWEST)
        total_ref[...] = jnp.zeros_like(total_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

        def step(chunk, _):
            slot = jax.lax.rem(first_slot + chunk, 2)

            @pl.when(chunk + 1 < chunks)
            def _():
                fetch(table_ref, last, chunk + 1, 1 - slot)

            @pl.when((chunk + 1 == chunks) & (item + 1 < count))
            def _():
                fetch(next_table_ref, last_ref[jnp.minimum(item + 1, last_ref.shape[0] - 1)], 0, 1 - slot)

            settle(table_ref, last, chunk, slot)

            @pl.when(chunk + 1 == chunks)
            def _():
                row = jax.lax.broadcasted_iota(jnp.int32, buffer_ref.shape[1:], 0)
                key = slots.position(chunk * chunk_tokens + row, page_size)
                if not scaled:
                    buffer_ref[slot] = jnp.where(key <= last, buffer_ref[slot], 0)

            _accumulate(
                q_ref[...],
                _numbers(buffer_ref[slot], q_ref.dtype),
                None if scale_buffer is None else [_row(scale_buffer, slot, part) for part in range(2)],
                (peak_ref, total_ref, acc_ref),
                first_position=first,
                last=last,
                first_key=chunk * chunk_tokens,
                position_of=lambda key: slots.position(key, page_size),
                heads=heads,
                rank=rank,
                scale=scale,
            )
            return _

        jax.lax.fori_loop(0, chunks, step, None)
        slot_ref[0] = jax.lax.rem(first_slot + chunks, 2)
        total = total_ref[...]
        out_ref[...] = (acc_ref[...] / jnp.where(total > 0, total, 1.0)).astype(out_ref.dtype)
        for ref in lse_ref:
            ref[...] = jnp.broadcast_to(log_sum(peak_ref[...], total), ref.shape)


def _numbers(stored, dtype):
    """Stored keys in the dtype of the products; 8-bit ones without their scales."""
    if stored.dtype == jnp.int8:
        return stored.astype(jnp.float32).astype(dtype)
    if stored.dtype == jnp.float8_e4m3fn:
        byte = pltpu.bitcast(stored, jnp.int8).astype(jnp.int32)
        return decode_byte(byte & 0xFF, stored.dtype).astype(dtype)
    return stored


def _row(buffer_ref, slot, part):
    """The scales of one part of a chunk's keys, [1, keys]."""
    pages = range(buffer_ref.shape[1])
    return jnp.concatenate([buffer_ref[slot, j, part : part + 1] for j in pages], axis=1)


def _accumulate(q, keys, scales, state, *, first_position, last, first_key, position_of, heads, rank, scale):
    """Folds one chunk of keys into the running maximum, sum and weighted values."""
    peak_ref, total_ref, acc_ref = state
    precision = jax.lax.Precision.HIGHEST if keys.dtype == jnp.float32 else None

    def dot(a, b):
        across = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(a, b, across, precision=precision, preferred_element_type=jnp.float32)

    if scales is None:
        scores = dot(q, keys)
    else:
        scores = dot(q[:, :rank], keys[:, :rank]) * scales[0] + dot(q[:, rank:], keys[:, rank:]) * scales[1]
    shape = scores.shape
    position = first_position + jax.lax.broadcasted_iota(jnp.int32, shape, 0) // heads
    key = position_of(first_key + jax.lax.broadcasted_iota(jnp.int32, shape, 1))
    seen = key <= position
    scores = jnp.where(seen, scores * scale, LOWEST)
    top = jnp.maximum(peak_ref[...], jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.where(seen, jnp.exp(scores - top), 0.0)
    fade = jnp.exp(peak_ref[...] - top)
    peak_ref[...] = top
    total_ref[...] = total_ref[...] * fade + jnp.sum(weights, axis=1, keepdims=True)
    if scales is not None:
        weights = weights * jnp.where(key[:1] <= last, scales[0], 0.0)
    values = jnp.dot(
        weights.astype(keys.dtype), keys[:, :rank], precision=precision, preferred_element_type=jnp.float32
    )
    acc_ref[...] = acc_ref[...] * fade + values

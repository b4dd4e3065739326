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

from pallas_kernels.common.slot_shard import SlotShard, log_sum, whole_pages
from pallas_kernels.common.varying import result_like, vary_together
from pallas_kernels.latent_paged_attention.items import Items, decode_items, prefill_items

LOWEST, LANES = -1e30, 128
CHUNK_TOKENS = 512
BLOCK_ROWS = 512
VMEM_LIMIT = 48 << 20


def refusal(q_latent: Array, pool: Array) -> str | None:
    """Why the kernel cannot run these arguments, None where it can."""
    if pool.dtype not in (jnp.float32, jnp.bfloat16):
        return f"pools must be float32 or bfloat16, got {pool.dtype.name}."
    if pool.shape[3] % 128 or q_latent.shape[2] % 128:
        return (
            f"the pool's last axis ({pool.shape[3]}) and the latent rank ({q_latent.shape[2]}) must be multiples of"
            " 128; pad the pool."
        )
    tile = 32 // pool.dtype.itemsize
    if pool.shape[2] % tile:
        return f"pages of {pool.dtype.name} must hold a multiple of {tile} positions, got {pool.shape[2]}."
    return None


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
    interpret=False,
) -> tuple[Float[Array, "T H Rl"], Float[Array, "T H"] | None]:
    """Output and, where the pool is a shard, log-sum-exp of the op, for a pool that already holds the new tokens."""
    tokens, heads, rank = q_latent.shape
    q = jnp.concatenate([q_latent, q_rope], axis=2).astype(pool.dtype)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, pool.shape[3] - q.shape[2])))
    run = functools.partial(
        _attend_items, pool, layer, page_table, slots, heads=heads, rank=rank, scale=scale, interpret=interpret
    )
    decode = decode_items(kv_lens, num_seqs, tokens)
    found = [jnp.pad(x, ((0, tokens - x.shape[0]), (0, 0), (0, 0))) for x in run(q[: decode.sequence.shape[0]], decode)]

    def with_prefill(found):
        size = max(1, BLOCK_ROWS // heads)
        items, row = prefill_items(kv_lens, cu_q_lens, num_seqs, tokens, size)
        token = items.first_token[:, None] + jnp.arange(size)
        blocks = q[jnp.minimum(token, tokens - 1)].reshape(-1, size * heads, q.shape[2])
        decoded = (jnp.arange(tokens) < num_seqs[0])[:, None, None]
        rows = [x.reshape(-1, heads, x.shape[-1])[row] for x in run(blocks, items)]
        return [jnp.where(decoded, old, new) for old, new in zip(found, rows, strict=True)]

    if max_q_len != 1:
        found = jax.lax.cond(num_seqs[1] > num_seqs[0], with_prefill, lambda found: found, found)
    real = (jnp.arange(tokens) < cu_q_lens[num_seqs[1]])[:, None, None]
    out = jnp.where(real, found[0], 0)
    if slots is None:
        return out.astype(q_latent.dtype), None
    return out, jnp.where(real, found[1], -jnp.inf)[..., 0]


def _attend_items(
    pool: Array,
    layer: Int[Array, ""],
    page_table: Int[Array, "S B"],
    slots: SlotShard | None,
    q: Float[Array, "I rows R"],
    items: Items,
    *,
    heads: int,
    rank: int,
    scale: float,
    interpret,
) -> list[Float[Array, "I rows _"]]:
    """Attention of blocks of queries, `heads` rows to a query; of a shard the log-sum-exp too, on every lane."""
    shard = slots or whole_pages()
    (count, rows, width), page_size = q.shape, pool.shape[2]
    pages = max(1, min(page_table.shape[1], CHUNK_TOKENS // page_size))
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
    operands = vary_together(*scalars, table, table, q, pool)

    def table_spec(ahead):
        def index(i, layer, count, sequence, *_):
            return sequence[jnp.minimum(i + ahead, sequence.shape[0] - 1)], 0, 0

        return pl.BlockSpec((None, 1, blocks), index, memory_space=pltpu.SMEM)

    return pl.pallas_call(
        functools.partial(_kernel, heads=heads, rank=rank, scale=scale, pages=pages, shards=shard.count),
        out_shape=[result_like(*shape, *operands) for shape in shapes],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(count,),
            in_specs=[
                table_spec(0),
                table_spec(1),
                pl.BlockSpec((None, rows, width), lambda i, *_: (i, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=[pl.BlockSpec((None, *shape[1:]), lambda i, *_: (i, 0, 0)) for shape, _ in shapes],
            scratch_shapes=[
                pltpu.VMEM((2, pages * page_size, width), pool.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.VMEM((rows, 1), jnp.float32),
                pltpu.VMEM((rows, 1), jnp.float32),
                pltpu.VMEM((rows, rank), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_LIMIT),
        interpret=interpret,
        name=f"latent_paged_attention_{rows // heads}",
    )(*operands)


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
    out_ref,
    *rest,
    heads,
    rank,
    scale,
    pages,
    shards,
):
    del sequence_ref
    *lse_ref, buffer_ref, arrived, slot_ref, peak_ref, total_ref, acc_ref = rest
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
                buffer_ref[slot] = jnp.where(key <= last, buffer_ref[slot], 0)

            _accumulate(
                q_ref[...],
                buffer_ref[slot],
                (peak_ref, total_ref, acc_ref),
                first_position=first,
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


def _accumulate(q, keys, state, *, first_position, first_key, position_of, heads, rank, scale):
    """Folds one chunk of keys into the running maximum, sum and weighted values."""
    peak_ref, total_ref, acc_ref = state
    precision = jax.lax.Precision.HIGHEST if keys.dtype == jnp.float32 else None
    scores = jax.lax.dot_general(
        q, keys, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
    shape = scores.shape
    position = first_position + jax.lax.broadcasted_iota(jnp.int32, shape, 0) // heads
    seen = position_of(first_key + jax.lax.broadcasted_iota(jnp.int32, shape, 1)) <= position
    scores = jnp.where(seen, scores * scale, LOWEST)
    top = jnp.maximum(peak_ref[...], jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.where(seen, jnp.exp(scores - top), 0.0)
    fade = jnp.exp(peak_ref[...] - top)
    peak_ref[...] = top
    total_ref[...] = total_ref[...] * fade + jnp.sum(weights, axis=1, keepdims=True)
    values = jnp.dot(
        weights.astype(keys.dtype), keys[:, :rank], precision=precision, preferred_element_type=jnp.float32
    )
    acc_ref[...] = acc_ref[...] * fade + values

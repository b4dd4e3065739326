"""The Mosaic kernel: one pass over work items, each a block of queries of one sequence.

First the new keys and values of all its sequences go from HBM to their pages. Then, item after item and chunk
of pages after chunk, the next chunk is fetched while the current one is used; pages without a key in view are
not fetched.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common.slot_shard import SlotShard, log_sum
from pallas_kernels.ragged_paged_attention.masks import first_visible
from pallas_kernels.ragged_paged_attention.words import head_elements, unpack

LOWEST = -1e30
LANES = 128


@dataclass(frozen=True)
class Plan:
    """What is fixed when the kernel is compiled."""

    block_q: int
    pages: int  # of a chunk
    page_size: int  # slots that the pool has of a page
    table_width: int
    kv_heads: int
    group: int
    dim: int  # lanes of a row: head dim rounded up to 128
    pack: int
    shards: int  # pools over which the slots of a page are split
    scaled: bool  # the pool's scales come as data
    lse: bool  # a row of the output ends with LANES times its log-sum-exp
    window: int | None
    chunk: int | None
    soft_cap: float | None
    pool_dtype: str
    dot_dtype: str
    interpret: bool

    @property
    def rows(self) -> int:
        return self.block_q * self.group

    @property
    def words(self) -> int:
        return 2 * self.kv_heads // self.pack


def kernel(
    meta,  # SMEM [5]: layer, first sequence, one past the last sequence, number of items, shard
    item_sequence,  # SMEM [N]
    item_offset,  # SMEM [N]: tokens of the sequence before the item
    kv_lens,  # SMEM [S]
    table,  # SMEM [S * B]
    cu_q_lens,  # SMEM [S + 1]
    sinks,  # VMEM [K, rows, LANES]: start of the softmax sum, LOWEST where there are no sinks
    *refs,
    plan: Plan,
):
    """Writes new rows to the pool, then attends; see `Plan` for the letters.

    `refs`, the starred ones only where plan.scaled:
      * scales_hbm [L, P, 2K, p] float32.
      q_hbm [K, T + block_q, G, 1, D] float32, scaled. new_hbm [T, words, pack, D].
      The pool and the output as they were, aliased.
      out_hbm as q_hbm, with LANES more for the log-sum-exp where plan.lse. pool [L, P, p, words, pack, D].
      * scale_buf VMEM [2, pages, 2K, p]. kv_buf VMEM [2, pages, p, words, pack, D].
      q_buf VMEM [2, K, block_q, G, 1, D]. o_buf likewise, as wide as out_hbm.
      peak, total VMEM [K, rows, LANES]. acc VMEM [K, rows, D]. Semaphores.
    """
    refs = list(refs)
    scales_hbm = refs.pop(0) if plan.scaled else None
    q_hbm, new_hbm, _, _, out_hbm, pool = refs[:6]
    scale_buf = refs.pop(6) if plan.scaled else None
    kv_buf, q_buf, o_buf, peak, total, acc, kv_sem, q_sem, o_sem, write_sem = refs[6:]
    layer, items, size = meta[0], meta[3], plan.page_size
    slots = SlotShard(meta[4], plan.shards)
    page_positions = slots.page(size)

    def write_rows(act):
        def sequence(s, _):
            kv_len, token = kv_lens[s], cu_q_lens[s]
            start = kv_len - (cu_q_lens[s + 1] - token)

            def block(b, _):
                page = table[s * plan.table_width + b]
                base = slots.position(b * size, size)
                low, high = jnp.maximum(start, base), jnp.minimum(kv_len, base + size)

                def one(i, _):
                    row = new_hbm.at[token + i - start]
                    act(pltpu.make_async_copy(row, pool.at[layer, page, i - base], write_sem))
                    return 0

                if plan.block_q == 1 or new_hbm.shape[0] < size:  # no sequence has a whole page of new rows
                    return lax.fori_loop(low, high, one, 0)

                @pl.when(high - low == size)
                def _():
                    rows = new_hbm.at[pl.ds(token + low - start, size)]
                    act(pltpu.make_async_copy(rows, pool.at[layer, page], write_sem))

                @pl.when(high - low != size)
                def _():
                    lax.fori_loop(low, high, one, 0)

                return 0

            stop = lax.div(kv_len + page_positions - 1, page_positions)
            return lax.fori_loop(lax.div(start, page_positions), stop, block, 0)

        lax.fori_loop(meta[1], meta[2], sequence, 0)

    def span(i):
        """First query position, number of queries, first block in view and one past the last, of item i."""
        s, offset = item_sequence[i], item_offset[i]
        q_len = cu_q_lens[s + 1] - cu_q_lens[s]
        position, count = kv_lens[s] - q_len + offset, jnp.minimum(plan.block_q, q_len - offset)
        first = first_visible(position, plan.window, plan.chunk)
        stop = lax.div(position + count - 1, page_positions) + 1
        return position, count, lax.div(first, page_positions), stop

    def fetch_kv(i, block, stop, slot, act):
        def one(j, _):
            page = table[item_sequence[i] * plan.table_width + block + j]
            act(pltpu.make_async_copy(pool.at[layer, page], kv_buf.at[slot, j], kv_sem.at[slot]))
            if scales_hbm is not None and scale_buf is not None:
                act(pltpu.make_async_copy(scales_hbm.at[layer, page], scale_buf.at[slot, j], kv_sem.at[slot]))
            return 0

        lax.fori_loop(0, jnp.minimum(plan.pages, stop - block), one, 0)

    def tokens(i):
        return pl.ds(cu_q_lens[item_sequence[i]] + item_offset[i], plan.block_q)

    def fetch_q(i):
        slot = lax.rem(i, 2)
        return pltpu.make_async_copy(q_hbm.at[:, tokens(i)], q_buf.at[slot], q_sem.at[slot])

    def store_out(i):
        return pltpu.make_async_copy(o_buf.at[lax.rem(i, 2)], out_hbm.at[:, tokens(i)], o_sem)

    def item(i, slot):
        position, count, start, stop = span(i)
        chunks = lax.div(stop - start + plan.pages - 1, plan.pages)
        fetch_q(i).wait()
        peak[...] = sinks[...]
        total[...] = jnp.where(sinks[...] > LOWEST, 1.0, 0.0)
        acc[...] = jnp.zeros_like(acc)

        def step(j, slot):
            block = start + j * plan.pages

            @pl.when(j + 1 < chunks)
            def _():
                fetch_kv(i, block + plan.pages, stop, 1 - slot, lambda copy: copy.start())

            @pl.when((j + 1 == chunks) & (i + 1 < items))
            def _():
                _, _, next_start, next_stop = span(i + 1)
                fetch_q(i + 1).start()
                fetch_kv(i + 1, next_start, next_stop, 1 - slot, lambda copy: copy.start())

            fetch_kv(i, block, stop, slot, lambda copy: copy.wait())
            last, key = position + count - 1, block * size
            whole = slots.position(key, size) >= first_visible(last, plan.window, plan.chunk)
            whole = whole & (slots.position(key + plan.pages * size - 1, size) <= position)
            pl.when(whole)(lambda: accumulate(i, slot, key, position, last, masked=False))
            pl.when(~whole)(lambda: accumulate(i, slot, key, position, last, masked=True))
            return 1 - slot

        slot = lax.fori_loop(0, chunks, step, slot)
        for h in range(plan.kv_heads):
            bottom = total[h][:, :1]
            rows = acc[h] / jnp.where(bottom > 0, bottom, 1.0)
            real = row_index() < count
            rows = jnp.where(real, rows, 0.0)
            if plan.lse:
                rows = jnp.concatenate([rows, log_sum(peak[h], total[h])], axis=1)
            put_rows(o_buf, (lax.rem(i, 2), h), rows)

        @pl.when(i > 0)
        def _():
            store_out(i - 1).wait()

        store_out(i).start()
        return slot

    def row_index():
        return lax.div(lax.broadcasted_iota(jnp.int32, (plan.rows, 1), 0), jnp.int32(plan.group))

    def put_rows(ref, index, value):
        if plan.interpret:
            ref[index] = value.reshape(plan.block_q, plan.group, 1, -1)
        else:
            ref.at[index].reshape(value.shape)[...] = value

    def get_rows(ref, index):
        if plan.interpret:
            return ref[index].reshape(plan.rows, plan.dim)
        return ref.at[index].reshape(plan.rows, plan.dim)[...]

    def get_words(slot, word):
        keys = plan.pages * size
        if plan.interpret:
            values = kv_buf[slot].reshape(keys, plan.words, plan.pack, plan.dim)[:, word]
            if plan.pack == 1:
                return lax.bitcast_convert_type(values[:, 0], jnp.int32)
            return lax.bitcast_convert_type(values.swapaxes(1, 2), jnp.int32)
        flat = kv_buf.bitcast(jnp.int32).at[slot].reshape(keys * plan.words, plan.dim)
        return flat[pl.ds(word, keys, stride=plan.words)]

    def get_scales(slot, row):
        """The scales of a key or value head over a chunk, [1, keys]."""
        assert scale_buf is not None, "a plan that is not scaled reads no scales"
        return jnp.concatenate([scale_buf[slot, j, row : row + 1] for j in range(plan.pages)], axis=1)

    def accumulate(i, slot, first_key, position, last, *, masked):
        """Adds the chunk of keys from `first_key` in `slot` to the online softmax of item i.

        `masked` unless every query of the item sees every key of the chunk.
        """
        keys, dot_dtype = plan.pages * size, jnp.dtype(plan.dot_dtype)
        precision = lax.Precision.HIGHEST if dot_dtype == jnp.float32 else None
        query = position + row_index()
        key = slots.position(first_key + lax.broadcasted_iota(jnp.int32, (1, keys), 1), size)
        seen = (key >= first_visible(query, plan.window, plan.chunk)) & (key <= jnp.minimum(query, last))

        def is_held(shape):
            key = slots.position(first_key + lax.broadcasted_iota(jnp.int32, shape, shape.index(keys)), size)
            return (key >= first_visible(position, plan.window, plan.chunk)) & (key <= last)

        held = is_held((keys, 1))
        pool_dtype = jnp.dtype(plan.pool_dtype)
        for h in range(plan.kv_heads):
            (k_word, k_index), (v_word, v_index) = head_elements(h, plan.pack)
            words = get_words(slot, k_word)
            k = unpack(words, k_index, pool_dtype).astype(dot_dtype)
            words = words if v_word == k_word else get_words(slot, v_word)
            v = unpack(words, v_index, pool_dtype)
            v = (jnp.where(held, v, 0.0) if masked else v).astype(dot_dtype)
            q = get_rows(q_buf, (lax.rem(i, 2), h)).astype(dot_dtype)
            scores = lax.dot_general(
                q, k, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
            )
            if plan.scaled:
                scores = scores * get_scales(slot, 2 * h)
            if plan.soft_cap is not None:
                scores = plan.soft_cap * jnp.tanh(scores * (1.0 / plan.soft_cap))
            scores = jnp.where(seen, scores, LOWEST) if masked else scores
            old = peak[h][:, :1]
            top = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
            weights = jnp.exp(scores - top)
            weights = jnp.where(seen, weights, 0.0) if masked else weights
            fade = jnp.exp(old - top)
            sums = total[h][:, :1] * fade + jnp.sum(weights, axis=1, keepdims=True)
            if plan.scaled:
                factors = get_scales(slot, 2 * h + 1)
                weights = weights * (jnp.where(is_held((1, keys)), factors, 0.0) if masked else factors)
            part = lax.dot_general(
                weights.astype(dot_dtype),
                v,
                (((1,), (0,)), ((), ())),
                precision=precision,
                preferred_element_type=jnp.float32,
            )
            acc[h] = acc[h] * fade + part
            peak[h] = jnp.broadcast_to(top, (plan.rows, LANES))
            total[h] = jnp.broadcast_to(sums, (plan.rows, LANES))

    write_rows(lambda copy: copy.start())
    write_rows(lambda copy: copy.wait())

    @pl.when(items > 0)
    def _():
        _, _, start, stop = span(0)
        fetch_q(0).start()
        fetch_kv(0, start, stop, 0, lambda copy: copy.start())
        lax.fori_loop(0, items, item, 0)
        store_out(items - 1).wait()

"""Ragged paged attention: writes the new keys and values of a batch into the pool and attends."""

from functools import partial
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.common.backends import choose_backend
from pallas_kernels.common.lazy import LazyModule
from pallas_kernels.common.quantised_pool import check_scales
from pallas_kernels.common.slot_shard import SlotShard
from pallas_kernels.ragged_paged_attention import cpu, reference
from pallas_kernels.ragged_paged_attention.checks import check_options, check_shapes

if TYPE_CHECKING:
    from jax.experimental.pallas.tpu import InterpretParams

gpu, tpu = (LazyModule(f"pallas_kernels.ragged_paged_attention.{name}") for name in ("gpu", "tpu"))


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
    window: int | None = None,
    chunk: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    max_q_len: int | None = None,
    slots: SlotShard | None = None,
    kv_scales: Float[Array, "L P 2K p"] | None = None,
    backend: str = "auto",
    interpret: "bool | InterpretParams" = False,
) -> tuple[Array, ...]:
    """Writes the keys and values of T query tokens of S sequences, then attends causally over their pages.

    Query head h uses KV head h // (H // K). Sequences stand in this order: those with exactly one query token
    (decode), then the rest (prefill chunks, verification of drafts), then padding.

    Args:
      q, k, v: the new tokens of all sequences, one sequence after another. Tokens at and past
        cu_q_lens[num_seqs[1]] are padding: they write nothing and their output is zero.
      kv_pool: `[L, P, p, 2K/pack, pack, D]`, stacked over the layers of a cache group; the merged axes
        2K/pack and pack are the heads k0, v0, k1, v1, …. Its D may be larger (see `pool_shape`). Updated in
        place where the caller donates it.
      layer: the layer of the pool to use.
      kv_lens: positions of each sequence with the new tokens counted, 0 for padding.
      page_table: page of block b of sequence s; entries of blocks that no query of this
        step sees may be anything.
      cu_q_lens: tokens of sequence s are q[cu_q_lens[s]:cu_q_lens[s + 1]].
      num_seqs: number of leading decode sequences, and number of sequences without padding.
      scale: factor of the scores before softmax.
      window: a position i sees (i - window, i]. chunk: it sees [i // chunk * chunk, i].
      soft_cap: c, scores become c * tanh(scores / c).
      sinks: a logit per query head that takes part in softmax and has no value.
      k_scale, v_scale: of an 8-bit pool, one for all; stored = value / scale.
      kv_scales: of an int8 or float8_e4m3fn pool, one a slot and head (k0, v0, k1, v1, …; see `scale_shape`), in
        place of k_scale and v_scale. New tokens are quantised by `common.quantised_pool.quantise` and their scales
        written, in place where the caller donates them; slots that hold no key in view do not matter.
      max_q_len: promise that no sequence has more query tokens; 1 compiles a program for decode alone.
      slots: the part of every page that this pool holds; page_table, kv_lens and the new tokens are those of the
        whole, and only the shard's own slots are written. Sinks count on shard 0. See `common.slot_shard`.
      backend: `auto`, `reference`, `tpu` or `gpu`.
      interpret: run a Pallas kernel on CPU, for tests: True as array code, in which a copy is done where it starts;
        InterpretParams (TPU kernels only) on a model of a TPU's memories, which finds races, 60 times slower.

    Returns:
      The output, in the dtype of q, and the pool with the new tokens written. Slots of the pool
      that hold none of the keys in view do not matter; they may hold NaN. With `slots`: the output over
      the shard's own positions in float32, the logarithm `[T, H]` of its sum of exponentials (-inf for
      padding and for rows that see none of them), and the pool; `merge_over` joins the shards. With
      `kv_scales`, these come last.

    Raises:
      ValueError: shapes, dtypes or options do not fit.
      UnsupportedError: no implementation can run them; every reason is listed.
    """
    check_shapes(q, k, v, kv_pool, kv_lens, page_table, cu_q_lens, num_seqs, sinks)
    if kv_scales is not None:
        check_scales("ragged_paged_attention", kv_pool, kv_scales, 2 * k.shape[1])
        if k_scale is not None or v_scale is not None:
            raise ValueError(f"kv_scales has every scale; k_scale={k_scale} and v_scale={v_scale} must be None.")
    check_options(scale, window, chunk, soft_cap, k_scale, v_scale, max_q_len)
    refusals = {
        "reference": lambda: None,
        "tpu": lambda: tpu.refusal(q, k, kv_pool, page_table, kv_scales),
        "gpu": lambda: gpu.refusal(q, k, kv_pool, page_table),
        "cpu": lambda: cpu.refusal(q, kv_pool),
    }
    run = {
        "reference": lambda: reference.ragged_paged_attention,
        "tpu": lambda: partial(tpu.ragged_paged_attention, interpret=interpret),
        "gpu": lambda: partial(gpu.ragged_paged_attention, interpret=interpret),
        "cpu": lambda: cpu.ragged_paged_attention,
    }[choose_backend("ragged_paged_attention", backend, refusals)]()
    return run(
        q,
        k,
        v,
        kv_pool,
        jnp.asarray(layer, jnp.int32),
        kv_lens,
        page_table,
        cu_q_lens,
        num_seqs,
        scale=scale,
        window=window,
        chunk=chunk,
        soft_cap=soft_cap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        max_q_len=max_q_len,
        slots=slots,
        kv_scales=kv_scales,
    )

"""Latent paged attention: writes the new latents of a batch into the pool and attends."""

import functools
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.common.backends import choose_backend
from pallas_kernels.common.lazy import LazyModule
from pallas_kernels.common.quantised_pool import LIMITS, check_scales
from pallas_kernels.common.slot_shard import SlotShard, whole_pages
from pallas_kernels.latent_paged_attention import cpu, reference
from pallas_kernels.latent_paged_attention.checks import check_shapes

if TYPE_CHECKING:
    from jax.experimental.pallas.tpu import InterpretParams

gpu, tpu = (LazyModule(f"pallas_kernels.latent_paged_attention.{name}") for name in ("gpu", "tpu"))


def latent_paged_attention(
    q_latent: Float[Array, "T H Rl"],
    q_rope: Float[Array, "T H Rr"],
    latent: Float[Array, "T Rl"],
    k_rope: Float[Array, "T Rr"],
    pool: Float[Array, "L P p R"],
    layer: Int[Array, ""],
    kv_lens: Int[Array, "S"],
    page_table: Int[Array, "S B"],
    cu_q_lens: Int[Array, "S+1"],
    num_seqs: Int[Array, "2"],
    *,
    scale: float,
    max_q_len: int | None = None,
    slots: SlotShard | None = None,
    kv_scales: Float[Array, "L P 2 p"] | None = None,
    backend: str = "auto",
    interpret: "bool | InterpretParams" = False,
) -> tuple[Array, ...]:
    """Causal attention in latent space: every head shares one key (latent, rope) and one value (latent) a position.

    The score of query t and position i is scale * (q_latent[t] . latent[i] + q_rope[t] . k_rope[i]); the output is
    the latent averaged by softmax (DeepSeek-V2, section 2.1, with the up-projections absorbed into query and
    output). Sequences stand in this order: those with exactly one query token (decode), the rest (prefill chunks,
    verification of drafts), padding.

    Args:
      q_latent, q_rope: queries, the key up-projection already applied, and their rotary part.
      latent, k_rope: the new tokens of all sequences, one sequence after another. Tokens at and past
        cu_q_lens[num_seqs[1]] are padding: they write nothing and their output is zero.
      pool: latents stacked over the layers of a cache group: Rl latent values, Rr rotary ones, then any number of
        unused lanes that hold zeros (R >= Rl + Rr). Updated in place where the caller donates it.
      layer: the layer of the pool to use.
      kv_lens: positions of each sequence with the new tokens counted, 0 for padding.
      page_table: page of block b of sequence s; entries at and past kv_len may be anything.
      cu_q_lens: tokens of sequence s are q_latent[cu_q_lens[s]:cu_q_lens[s + 1]].
      num_seqs: number of leading decode sequences, and number of sequences without padding.
      scale: factor of the scores before softmax.
      max_q_len: promise that no sequence has more query tokens; 1 compiles a program for decode alone.
      slots: the part of every page that this pool holds; page_table, kv_lens and the new tokens are those of the
        whole, and only the shard's own slots are written. See `common.slot_shard`.
      kv_scales: of an int8 or float8_e4m3fn pool, two a slot: of its latent and of its rotary part. New tokens are
        quantised by `common.quantised_pool.quantise` and their scales written, in place where the caller donates
        them; slots that hold no position in view do not matter.
      backend: `auto`, `reference`, `tpu`, `gpu` or `cpu` (native kernels).
      interpret: run a Pallas kernel on CPU, for tests: True as array code, in which a copy is done where it starts;
        InterpretParams (TPU kernels only) on a model of a TPU's memories, which finds races, 60 times slower.

    Returns:
      The output, in the dtype of q_latent, and the pool with the new tokens written. Slots that hold no position in
      view are never read into the result; they may hold NaN. With `slots`: the output over the shard's own positions
      in float32, the logarithm `[T, H]` of its sum of exponentials (-inf for padding and for rows that see none of
      them), and the pool; `merge_over` joins the shards. With `kv_scales`, these come last.

    Raises:
      ValueError: shapes or dtypes do not fit.
      UnsupportedError: no implementation can run them; every reason is listed.
    """
    check_shapes(q_latent, q_rope, latent, k_rope, pool, kv_lens, page_table, cu_q_lens, num_seqs)
    if kv_scales is not None:
        check_scales("latent_paged_attention", pool, kv_scales, 2)
    elif pool.dtype.name in LIMITS:
        raise ValueError(f"latent_paged_attention: a pool of {pool.dtype.name} needs its kv_scales; got None.")
    refusals = {
        "reference": lambda: None,
        "tpu": lambda: tpu.refusal(q_latent, pool, kv_scales),
        "gpu": lambda: gpu.refusal(pool),
        "cpu": lambda: cpu.refusal(q_latent, pool),
    }
    chosen = choose_backend("latent_paged_attention", backend, refusals)
    layer = jnp.asarray(layer, jnp.int32)
    batch = (kv_lens, page_table, cu_q_lens, num_seqs)
    if chosen == "cpu":
        new = (q_latent, q_rope, latent, k_rope)
        return cpu.latent_paged_attention(*new, pool, layer, *batch, scale=scale, slots=slots, kv_scales=kv_scales)
    attend = {
        "reference": lambda: reference.attend,
        "tpu": lambda: functools.partial(tpu.attend, interpret=interpret),
        "gpu": lambda: functools.partial(gpu.attend, interpret=interpret),
    }[chosen]()
    shard = slots or whole_pages()
    by_pages = chosen == "tpu" and kv_scales is not None
    pool, kv_scales = reference.write_latents(latent, k_rope, pool, layer, *batch, shard, kv_scales, by_pages)
    options = {"scale": scale, "max_q_len": max_q_len, "slots": slots, "kv_scales": kv_scales}
    found = attend(q_latent, q_rope, pool, layer, *batch, **options)
    return tuple(x for x in (*found, pool, kv_scales) if x is not None)

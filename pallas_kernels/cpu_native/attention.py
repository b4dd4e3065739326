"""Paged attention that reads pages where they lie and writes new tokens in place."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.common.quantised_pool import quantise
from pallas_kernels.common.slot_shard import SlotShard, whole_pages
from pallas_kernels.cpu_native.load import require
from pallas_kernels.latent_paged_attention.reference import new_rows
from pallas_kernels.ragged_paged_attention.values import encode

_POOL = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2")


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
    slots: SlotShard | None = None,
    kv_scales: Float[Array, "L P rows p"] | None = None,
    isa: str = "auto",
) -> tuple[Array, ...]:
    """As `pallas_kernels.ragged_paged_attention`, whose contract it is; arithmetic is float32.

    A query's result has the same bits alone, in any batch, chunked or with its prefix cached, and for any number
    of threads. A page id, length or layer out of range is an error of the call at run time and writes nothing.

    Raises:
      NotImplementedError: no native library here, or no kernels for these dtypes; the message says which.
    """
    refuse_dtypes(q, kv_pool)
    require(isa)
    if kv_scales is None:
        (k, v), added = (encode(new, by, kv_pool.dtype) for new, by in ((k, k_scale), (v, v_scale))), None
    else:
        (k, by_k), (v, by_v) = (quantise(new, kv_pool.dtype) for new in (k, v))
        added = jnp.stack([by_k, by_v], axis=2).reshape(q.shape[0], -1)
    scales = _scales(added, kv_scales)
    results = _results(q, kv_pool, slots, scales[1])
    call = jax.ffi.ffi_call("ti_ragged_attention", results, input_output_aliases={3: 1, 12: 3})
    shard = slots or whole_pages()
    batch = _batch(layer, kv_lens, page_table, cu_q_lens, num_seqs, shard.index)
    sinks = jnp.zeros((0,), jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    attributes = {
        "scale": np.float32(scale * (k_scale or 1.0)),
        "v_scale": np.float32(v_scale or 1.0),
        "soft_cap": np.float32(soft_cap or 0.0),
        "window": np.int64(window or 0),
        "chunk": np.int64(chunk or 0),
        "shards": np.int64(shard.count),
    }
    found = call(q, k, v, kv_pool, *batch, sinks, *scales, **attributes, isa=isa)
    return _wanted(found, slots, kv_scales)


def latent_paged_attention(
    q_latent: Float[Array, "T H Rl"],
    q_rope: Float[Array, "T H Rr"],
    latent: Float[Array, "T Rl"],
    k_rope: Float[Array, "T Rr"],
    pool: Float[Array, "L P p R"],
    layer: Int[Array, ""],
    kv_lens: Int[Array, " S"],
    page_table: Int[Array, "S B"],
    cu_q_lens: Int[Array, " S+1"],
    num_seqs: Int[Array, " 2"],
    *,
    scale: float,
    slots: SlotShard | None = None,
    kv_scales: Float[Array, "L P rows p"] | None = None,
    isa: str = "auto",
) -> tuple[Array, ...]:
    """As `pallas_kernels.latent_paged_attention`, whose contract it is; see `ragged_paged_attention` for the rest."""
    refuse_dtypes(q_latent, pool)
    require(isa)
    rows, added = new_rows(latent, k_rope, pool, quantised=kv_scales is not None)
    scales = _scales(added, kv_scales)
    results = _results(q_latent, pool, slots, scales[1])
    call = jax.ffi.ffi_call("ti_latent_attention", results, input_output_aliases={3: 1, 11: 3})
    shard = slots or whole_pages()
    batch = _batch(layer, kv_lens, page_table, cu_q_lens, num_seqs, shard.index)
    attributes = {"scale": np.float32(scale), "shards": np.int64(shard.count)}
    q_rope = q_rope.astype(q_latent.dtype)
    found = call(q_latent, q_rope, rows, pool, *batch, *scales, **attributes, isa=isa)
    return _wanted(found, slots, kv_scales)


def refuse_dtypes(q: Array, pool: Array) -> None:
    """Raises NotImplementedError where there are no kernels for these dtypes."""
    if q.dtype.name not in ("float32", "bfloat16") or pool.dtype.name not in _POOL:
        raise NotImplementedError(
            f"native attention takes queries in float32 or bfloat16 and pools in {', '.join(_POOL)};"
            f" got q {q.dtype} and pool {pool.dtype}"
        )


def _scales(added: Array | None, kv_scales: Array | None) -> tuple[Array, Array]:
    """The scales of the new tokens and of the pool; empty where it has none."""
    if added is None or kv_scales is None:
        return jnp.zeros((0, 0)), jnp.zeros((0, 0, 0, 0))
    return added, kv_scales


def _wanted(found, slots: SlotShard | None, kv_scales: Array | None) -> tuple[Array, ...]:
    """What the contract returns of the call's results."""
    out, pool, lse, scales = found
    sums = () if slots is None else (lse,)
    return out, *sums, pool, *(() if kv_scales is None else (scales,))


def _results(q: Array, pool: Array, slots: SlotShard | None, scales: Array) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Output, pool, log-sum-exp, which is empty unless the pool is a shard, and the pool's scales."""
    dtype, rows = (q.dtype, (0,)) if slots is None else (jnp.float32, q.shape[:2])
    shapes = ((q.shape, dtype), (pool.shape, pool.dtype), (rows, jnp.float32), (scales.shape, jnp.float32))
    return tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes)


def _batch(layer, *arrays) -> tuple[Array, ...]:
    return jnp.asarray(layer, jnp.int32), *arrays

"""Paged attention that reads pages where they lie and writes new tokens in place."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.common.slot_shard import SlotShard, whole_pages
from pallas_kernels.cpu_native.load import require
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
    k, v = (encode(new, by, kv_pool.dtype) for new, by in ((k, k_scale), (v, v_scale)))
    call = jax.ffi.ffi_call("ti_ragged_attention", _results(q, kv_pool, slots), input_output_aliases={3: 1})
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
    out, pool, lse = call(q, k, v, kv_pool, *batch, sinks, **attributes, isa=isa)
    return (out, pool) if slots is None else (out, lse, pool)


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
    isa: str = "auto",
) -> tuple[Array, ...]:
    """As `pallas_kernels.latent_paged_attention`, whose contract it is; see `ragged_paged_attention` for the rest."""
    refuse_dtypes(q_latent, pool)
    require(isa)
    rows = jnp.concatenate([latent, k_rope], axis=1).astype(pool.dtype)
    rows = jnp.pad(rows, ((0, 0), (0, pool.shape[-1] - rows.shape[1])))
    call = jax.ffi.ffi_call("ti_latent_attention", _results(q_latent, pool, slots), input_output_aliases={3: 1})
    shard = slots or whole_pages()
    batch = _batch(layer, kv_lens, page_table, cu_q_lens, num_seqs, shard.index)
    attributes = {"scale": np.float32(scale), "shards": np.int64(shard.count)}
    out, pool, lse = call(q_latent, q_rope.astype(q_latent.dtype), rows, pool, *batch, **attributes, isa=isa)
    return (out, pool) if slots is None else (out, lse, pool)


def refuse_dtypes(q: Array, pool: Array) -> None:
    """Raises NotImplementedError where there are no kernels for these dtypes."""
    if q.dtype.name not in ("float32", "bfloat16") or pool.dtype.name not in _POOL:
        raise NotImplementedError(
            f"native attention takes queries in float32 or bfloat16 and pools in {', '.join(_POOL)};"
            f" got q {q.dtype} and pool {pool.dtype}"
        )


def _results(q: Array, pool: Array, slots: SlotShard | None) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Output, pool, and log-sum-exp, which is empty unless the pool is a shard."""
    dtype, rows = (q.dtype, (0,)) if slots is None else (jnp.float32, q.shape[:2])
    shapes = ((q.shape, dtype), (pool.shape, pool.dtype), (rows, jnp.float32))
    return tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes)


def _batch(layer, *arrays) -> tuple[Array, ...]:
    return jnp.asarray(layer, jnp.int32), *arrays

"""Refusal of arguments that do not fit, when tracing. Values are checked by `common.batch_values`."""

import jax.numpy as jnp
from jaxtyping import Array

POOL_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")


def check_shapes(
    q: Array,
    k: Array,
    v: Array,
    kv_pool: Array,
    kv_lens: Array,
    page_table: Array,
    cu_q_lens: Array,
    num_seqs: Array,
    sinks: Array | None,
) -> None:
    """Raises ValueError where shapes or dtypes contradict each other; the message names both sides."""
    if q.ndim != 3 or k.ndim != 3 or k.shape != v.shape:
        raise ValueError(f"q must be [T, H, D], k and v [T, K, D]; got {q.shape}, {k.shape}, {v.shape}.")
    tokens, heads, dim = q.shape
    if (k.shape[0], k.shape[2]) != (tokens, dim):
        raise ValueError(f"q is {q.shape}, k is {k.shape}: their tokens (axis 0) and dim (axis 2) must agree.")
    if heads % k.shape[1]:
        raise ValueError(f"{heads} query heads cannot share {k.shape[1]} KV heads evenly.")
    if kv_pool.ndim != 6:
        raise ValueError(f"kv_pool must be [L, P, p, 2K/pack, pack, D]; got {kv_pool.shape}.")
    if kv_pool.shape[3] * kv_pool.shape[4] != 2 * k.shape[1] or kv_pool.shape[5] < dim:
        raise ValueError(
            f"kv_pool holds {kv_pool.shape[3]} x {kv_pool.shape[4]} rows of {kv_pool.shape[5]} a token; "
            f"k of shape {k.shape} needs {2 * k.shape[1]} rows of {dim} or more."
        )
    if kv_pool.dtype.name not in POOL_DTYPES:
        raise ValueError(f"kv_pool has dtype {kv_pool.dtype.name}; allowed are {', '.join(POOL_DTYPES)}.")
    sequences = kv_lens.shape[0]
    if page_table.ndim != 2 or page_table.shape[0] != sequences:
        raise ValueError(f"page_table must be [S, B] with S={sequences} (kv_lens); got {page_table.shape}.")
    if cu_q_lens.shape != (sequences + 1,):
        raise ValueError(f"cu_q_lens must have S+1={sequences + 1} entries; got {cu_q_lens.shape}.")
    if num_seqs.shape != (2,):
        raise ValueError(f"num_seqs must be [decode sequences, all sequences]; got shape {num_seqs.shape}.")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks must have one value for each of {heads} query heads; got {sinks.shape}.")
    named = {"kv_lens": kv_lens, "page_table": page_table, "cu_q_lens": cu_q_lens, "num_seqs": num_seqs}
    for name, array in named.items():
        if jnp.dtype(array.dtype) != jnp.int32:
            raise ValueError(f"{name} must be int32; got {array.dtype.name}.")


def check_options(
    scale: float,
    window: int | None,
    chunk: int | None,
    soft_cap: float | None,
    k_scale: float | None,
    v_scale: float | None,
    max_q_len: int | None,
) -> None:
    """Raises ValueError for an option out of its range."""
    if not scale > 0:
        raise ValueError(f"scale must be positive; got {scale}.")
    for name, size in (("window", window), ("chunk", chunk), ("max_q_len", max_q_len)):
        if size is not None and size < 1:
            raise ValueError(f"{name} must be at least 1, or None for no limit; got {size}.")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap must be positive, or None for none; got {soft_cap}.")
    for name, value in (("k_scale", k_scale), ("v_scale", v_scale)):
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be positive, or None for 1; got {value}.")

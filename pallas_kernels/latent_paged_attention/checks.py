"""Refusal of arguments that do not fit, when tracing."""

import jax.numpy as jnp
from jaxtyping import Array

POOL_DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")


def check_shapes(
    q_latent: Array,
    q_rope: Array,
    latent: Array,
    k_rope: Array,
    pool: Array,
    kv_lens: Array,
    page_table: Array,
    cu_q_lens: Array,
    num_seqs: Array,
) -> None:
    """Raises ValueError where shapes or dtypes contradict each other; the message names both sides."""
    if q_latent.ndim != 3 or q_rope.ndim != 3 or q_latent.shape[:2] != q_rope.shape[:2]:
        raise ValueError(f"q_latent must be [T, H, Rl] and q_rope [T, H, Rr]; got {q_latent.shape} and {q_rope.shape}.")
    tokens = q_latent.shape[0]
    for name, new, query in (("latent", latent, q_latent), ("k_rope", k_rope, q_rope)):
        if new.shape != (tokens, query.shape[2]):
            raise ValueError(f"{name} must be [T, R] = {(tokens, query.shape[2])} to fit its query; got {new.shape}.")
    rank = q_latent.shape[2] + q_rope.shape[2]
    if pool.ndim != 4 or pool.shape[3] < rank:
        raise ValueError(f"pool must be [L, P, p, R] with R >= {rank} (latent and rope); got {pool.shape}.")
    if pool.dtype.name not in POOL_DTYPES:
        raise ValueError(f"pool has dtype {pool.dtype.name}; allowed are {', '.join(POOL_DTYPES)}.")
    sequences = kv_lens.shape[0]
    if page_table.ndim != 2 or page_table.shape[0] != sequences:
        raise ValueError(f"page_table must be [S, B] with S={sequences} (kv_lens); got {page_table.shape}.")
    if cu_q_lens.shape != (sequences + 1,):
        raise ValueError(f"cu_q_lens must have S+1={sequences + 1} entries; got {cu_q_lens.shape}.")
    if num_seqs.shape != (2,):
        raise ValueError(f"num_seqs must be [decode sequences, all sequences]; got shape {num_seqs.shape}.")
    named = {"kv_lens": kv_lens, "page_table": page_table, "cu_q_lens": cu_q_lens, "num_seqs": num_seqs}
    for name, array in named.items():
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} must be int32; got {array.dtype.name}.")

"""Ragged paged attention by the native CPU kernels, which are imported (and built) only when asked for."""

from typing import Any

import jax
from jaxtyping import Array


def refusal(q: Array, kv_pool: Array) -> str | None:
    """Why the native kernels cannot run these arguments here; None where they can."""
    if jax.default_backend() != "cpu":
        return f"the default platform is {jax.default_backend()}."
    from pallas_kernels.cpu_native.attention import refuse_dtypes
    from pallas_kernels.cpu_native.load import native

    if not native().isas:
        return f"{native().reason}."
    try:
        refuse_dtypes(q, kv_pool)
    except NotImplementedError as error:
        return f"{error}."
    return None


def ragged_paged_attention(*args: Array, max_q_len: int | None = None, **options: Any) -> tuple[Array, ...]:
    """As the contract of the op says; `max_q_len` is of no use to it."""
    from pallas_kernels.cpu_native.attention import ragged_paged_attention as native_attention

    del max_q_len
    return native_attention(*args, **options)

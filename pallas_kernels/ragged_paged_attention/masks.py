"""Which positions a query sees: causal, narrowed by a sliding window or by fixed chunks."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int


def first_visible(position: Int[Array, "..."], window: int | None, chunk: int | None) -> Int[Array, "..."]:
    """Smallest position that a query at `position` sees; it sees every one from there to itself.

    A window w shows (position - w, position]; a chunk c shows [position // c * c, position].
    """
    first = jnp.zeros_like(position)
    if window is not None:
        first = jnp.maximum(first, position - (window - 1))
    if chunk is not None:
        first = jnp.maximum(first, position - lax.rem(position, jnp.full_like(position, chunk)))
    return first

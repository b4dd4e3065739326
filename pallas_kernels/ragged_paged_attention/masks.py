"""Which positions a query sees: causal, narrowed by a sliding window or by fixed chunks."""

from jaxtyping import Array, Int


def first_visible(position: Int[Array, "..."], window: int | None, chunk: int | None) -> Int[Array, "..."]:
    """Smallest position that a query at `position` sees; it sees every one from there to itself.

    A window w shows (position - w, position]; a chunk c shows [position // c * c, position]. Works on
    jax and numpy arrays and on traced scalars alike.
    """
    first = position * 0
    if window is not None:
        first = first + (position - (window - 1)) * (position >= window)
    if chunk is not None:
        start = position - position % chunk
        first = first + (start - first) * (start > first)
    return first

"""A mixture in slices, so that the rows of its (token, choice) pairs never lie in memory all at once.

The way in is cut along sorted rows, the way out along columns: both read each expert's weights once, up to the expert
at a cut, where slices of tokens would read all of them again.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.common.varying import vary_like

SLICE_BYTES = 32 << 20
"""Of rows that are held at once: well above what keeps a device busy, and small beside a pool."""

COLUMN_STEP = 128


def rows_at_once(rows: int, row_bytes: int, tile: int) -> int:
    """Rows of a slice, a multiple of `tile`: all where they are few, otherwise a power of two of them."""
    padded = -(-rows // tile) * tile
    if padded * row_bytes <= SLICE_BYTES:
        return padded
    return max(tile, 1 << (SLICE_BYTES // row_bytes).bit_length() - 1)


def columns_at_once(rows: int, columns: int, itemsize: int, fewer: int) -> int:
    """Columns of a slice: the most that divide all of them, in steps of COLUMN_STEP, and are few enough; with `fewer`,
    that part of as many."""
    fitting = [columns // n for n in range(1, columns + 1) if columns % n == 0 and columns // n % COLUMN_STEP == 0]
    small = [width for width in fitting if rows * width * itemsize <= SLICE_BYTES // fewer]
    return max(small) if small else min(fitting, default=columns)


def by_rows(
    step: Callable[[Int[Array, ""], Int[Array, "E"]], Float[Array, "planes n F"]],
    group_sizes: Int[Array, "E"],
    rows: int,
    at_once: int,
    shape: tuple[int, int],
    dtype: jnp.dtype,
    operands: tuple,
) -> Float[Array, "planes N F"]:
    """step(first row, sizes of the groups within the slice) for slices of `at_once` rows, one below the other.

    Slices past the last group are left at zero and cost nothing. shape: planes and F. dtype: the result's.
    operands: what `step` reads. N is `rows` rounded up to whole slices.
    """
    if at_once >= rows:
        return step(jnp.int32(0), group_sizes)
    ends = jnp.cumsum(group_sizes)

    def body(i, done):
        first = i * at_once
        low, high = (jnp.clip(edge - first, 0, at_once) for edge in (ends - group_sizes, ends))
        return lax.dynamic_update_slice(done, step(first, high - low), (0, first, 0))

    planes, width = shape
    start = jnp.zeros((planes, -(-rows // at_once) * at_once, width), dtype)
    used = (ends[-1] + at_once - 1) // at_once
    return lax.fori_loop(0, used, body, vary_like(start, group_sizes, *operands))


def by_columns(
    step: Callable[[Int[Array, ""]], Float[Array, "T n"]],
    tokens: int,
    columns: int,
    at_once: int,
    dtype: jnp.dtype,
    operands: tuple,
) -> Float[Array, "T M"]:
    """step(first column) for slices of `at_once` columns, one beside the other."""

    def body(i, done):
        first = i * at_once
        return lax.dynamic_update_slice(done, step(first), (0, first))

    start = vary_like(jnp.zeros((tokens, columns), dtype), *operands)
    return lax.fori_loop(0, columns // at_once, body, start)

"""Copies between arrays of different element type or memory order, at the speed of memory where numpy allows."""

import ml_dtypes
import numpy as np

_BF16 = np.dtype(ml_dtypes.bfloat16)
_FLOATS = {np.dtype(d) for d in (np.float64, np.float32, np.float16)} | {_BF16}
_TILE = 64


def convertible(source: np.dtype, target: np.dtype) -> bool:
    """True when values of `source` mean the same in `target`: equal types, both unscaled floating point, or token
    numbers, which int32 holds."""
    numbers = source == np.int64 and target == np.int32
    return source == target or numbers or (source in _FLOATS and target in _FLOATS)


def copy_into(target: np.ndarray, source: np.ndarray) -> None:
    """`target[...] = source`, rounding to nearest even; shapes are equal, both may be strided."""
    if source.dtype == target.dtype and target.dtype.itemsize in (1, 2, 4, 8):
        integer = np.dtype(f"u{target.dtype.itemsize}")
        target, source = target.view(integer), source.view(integer)
    elif source.dtype == _BF16 and target.dtype == np.float32:
        _each(_widen, target.view(np.uint32), source.view(np.uint16))
        return
    _each(_assign, target, source)


def _assign(target: np.ndarray, source: np.ndarray) -> None:
    np.copyto(target, source, casting="unsafe")


def _widen(target: np.ndarray, source: np.ndarray) -> None:
    np.left_shift(source, np.uint32(16), out=target, dtype=np.uint32)


def _each(move, target: np.ndarray, source: np.ndarray) -> None:
    """Calls `move` on tiles when the fastest axes of the two differ (a transposed view), else on the whole."""
    inner = _fastest_axis(source)
    if target.ndim < 2 or inner in (None, target.ndim - 1):
        move(target, source)
        return
    for start in range(0, target.shape[inner], _TILE):
        tile = (slice(None),) * inner + (slice(start, start + _TILE),)
        move(target[tile], source[tile])


def _fastest_axis(x: np.ndarray) -> int | None:
    """The axis along which neighbours in memory lie, None when no axis is contiguous."""
    axes = [a for a in range(x.ndim) if x.shape[a] > 1 and x.strides[a] == x.itemsize]
    return axes[-1] if axes else None

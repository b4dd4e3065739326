"""Rounding weights to eight or four bits, in numpy, a block of rows at a time.

| recipe    | element                   | scale                                          | bits a weight |
|-----------|---------------------------|------------------------------------------------|---------------|
| `int8`    | [-127, 127]               | float32 a row: largest magnitude / 127         | 8             |
| `int4`    | [-8, 7], groups of 32     | bfloat16 a group: least squares of five        | 4.5           |
| `int4_64` | [-8, 7], groups of 64     | the same                                       | 4.25          |
| `fp8`     | e4m3                      | float32 a row: largest magnitude / 448         | 8             |
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from pallas_kernels.quantised_matmul.formats import Format

_BLOCK = 1 << 19  # values rounded at a time: 2 MiB of float32
_FP8 = ml_dtypes.float8_e4m3fn
_DIVISORS = (9.0, 8.5, 8.0, 7.5, 7.0)
"""The value of largest magnitude of a group over minus one of these is its scale: it may be cut, or not be an end."""


@dataclass(frozen=True)
class Recipe:
    """A format and how many elements of a row share a scale (0: all)."""

    format: Format
    group: int = 0

    @property
    def per_item(self) -> int:
        """Elements in one item of the packed array."""
        return 8 if self.format == "int4" else 1

    @property
    def packed_dtype(self) -> np.dtype:
        return np.dtype({"int8": np.int8, "int4": np.int32, "fp8_row": np.uint8}[self.format])

    @property
    def scale_dtype(self) -> np.dtype:
        return np.dtype(ml_dtypes.bfloat16 if self.format == "int4" else np.float32)


RECIPES = {
    "int8": Recipe("int8"),
    "int4": Recipe("int4", 32),
    "int4_64": Recipe("int4", 64),
    "fp8": Recipe("fp8_row"),
}


def scales_of(weight: np.ndarray, recipe: Recipe, in_axes: int = 1) -> np.ndarray:
    """Scales of a weight `[*out, *in]`: `[*out]`, or `[*out, in / group]` over its flattened `in` axes."""
    return _by_blocks(weight, recipe, in_axes, _scales, recipe.scale_dtype)


def packed(weight: np.ndarray, recipe: Recipe, in_axes: int = 1) -> np.ndarray:
    """Elements of a weight `[*out, *in]` rounded to its scales: `[*out, in / per_item]`."""

    def pack(rows: np.ndarray, recipe: Recipe) -> np.ndarray:
        return _pack(rows, _scales(rows, recipe).astype(recipe.scale_dtype).astype(np.float32), recipe)

    return _by_blocks(weight, recipe, in_axes, pack, recipe.packed_dtype)


def _by_blocks(weight: np.ndarray, recipe: Recipe, in_axes: int, work, dtype: np.dtype) -> np.ndarray:
    """`work` on float32 rows, a few at a time, whatever the memory order of `weight`."""
    *lead, rows = weight.shape[: weight.ndim - in_axes]
    width = int(np.prod(weight.shape[weight.ndim - in_axes :]))
    step = max(1, _BLOCK // max(1, width))
    tail = work(np.zeros((1, width), np.float32), recipe).shape[1:]
    out = np.empty((*lead, rows, *tail), dtype)
    for index in np.ndindex(*lead):
        for start in range(0, rows, step):
            part = weight[index][start : start + step]
            values = np.ascontiguousarray(part, dtype=np.float32).reshape(len(part), width)
            out[index][start : start + step] = work(values, recipe)
    return out


def _scales(rows: np.ndarray, recipe: Recipe) -> np.ndarray:
    """float32 `[rows]`, or `[rows, groups]`; 1 where all elements are zero."""
    if recipe.format != "int4":
        most = 127.0 if recipe.format == "int8" else float(ml_dtypes.finfo(_FP8).max)
        scale = np.maximum(rows.max(axis=1), -rows.min(axis=1)) / np.float32(most)
        return np.where(scale > 0, scale, np.float32(1))
    grid = rows.reshape(len(rows), -1, recipe.group)
    high, low = grid.max(axis=2), grid.min(axis=2)
    extreme = np.where(-low > high, low, high)
    extreme = np.where(extreme == 0, np.float32(1), extreme)
    best, least = np.empty_like(extreme), np.full_like(extreme, np.inf)
    for divisor in _DIVISORS:
        scale = (extreme / np.float32(-divisor)).astype(recipe.scale_dtype).astype(np.float32)
        wrong = np.clip(np.rint(grid / scale[..., None]), -8, 7)
        wrong *= scale[..., None]
        wrong -= grid
        error = np.einsum("rgi,rgi->rg", wrong, wrong)
        better = error < least
        best, least = np.where(better, scale, best), np.where(better, error, least)
    return best


def _pack(rows: np.ndarray, scale: np.ndarray, recipe: Recipe) -> np.ndarray:
    if recipe.format == "int8":
        return np.clip(np.rint(rows / scale[:, None]), -127, 127).astype(np.int8)
    if recipe.format == "fp8_row":
        most = float(ml_dtypes.finfo(_FP8).max)
        return np.clip(rows / scale[:, None], -most, most).astype(_FP8).view(np.uint8)
    grid = rows.reshape(len(rows), -1, recipe.group)
    nibbles = (np.clip(np.rint(grid / scale[..., None]), -8, 7) + 8).astype(np.uint8).reshape(len(rows), -1)
    return (nibbles[:, ::2] | (nibbles[:, 1::2] << 4)).view("<i4")

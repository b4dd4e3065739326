"""Rounding weights to eight or four bits, in numpy, a block of rows at a time.

| recipe    | element                   | scale                                                    | bits a weight |
|-----------|---------------------------|----------------------------------------------------------|---------------|
| `int8`    | [-127, 127]               | float32 a row: largest magnitude / 127                   | 8             |
| `int4`    | [-8, 7], groups of 32     | bfloat16 scale and offset a group: least squares of four | 5             |
| `int4_64` | [-8, 7], groups of 64     | the same                                                 | 4.5           |
| `fp8`     | e4m3                      | float32 a row: largest magnitude / 448                   | 8             |
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from pallas_kernels.quantised_matmul.formats import Format

_BLOCK = 1 << 19  # values rounded at a time: 2 MiB of float32
_FP8 = ml_dtypes.float8_e4m3fn
_SPANS = (1.0, 0.88)
"""Shares of a group's range that its sixteen steps first span; each is then fitted once to what it rounded to."""


@dataclass(frozen=True)
class Recipe:
    """A format and how many elements of a row share a scale (0: all)."""

    format: Format
    group: int = 0

    @property
    def per_item(self) -> int:
        """Elements in one item of the packed array."""
        return 8 if self.format == "int4_affine" else 1

    @property
    def packed_dtype(self) -> np.dtype:
        return np.dtype({"int8": np.int8, "int4_affine": np.int32, "fp8_row": np.uint8}[self.format])

    @property
    def scale_dtype(self) -> np.dtype:
        return np.dtype(np.int32 if self.format == "int4_affine" else np.float32)


RECIPES = {
    "int8": Recipe("int8"),
    "int4": Recipe("int4_affine", 32),
    "int4_64": Recipe("int4_affine", 64),
    "fp8": Recipe("fp8_row"),
}


def scales_of(weight: np.ndarray, recipe: Recipe, in_axes: int = 1) -> np.ndarray:
    """Scales of a weight `[*out, *in]`: `[*out]`, or `[*out, in / group]` over its flattened `in` axes."""
    return _by_blocks(weight, recipe, in_axes, _scales, recipe.scale_dtype)


def packed(weight: np.ndarray, recipe: Recipe, in_axes: int = 1) -> np.ndarray:
    """Elements of a weight `[*out, *in]` rounded to its scales: `[*out, in / per_item]`."""

    def pack(rows: np.ndarray, recipe: Recipe) -> np.ndarray:
        return _pack(rows, _scales(rows, recipe), recipe)

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
    """float32 `[rows]`, 1 where all elements are zero; or int32 `[rows, groups]`, a scale and an offset in each."""
    if recipe.format != "int4_affine":
        most = 127.0 if recipe.format == "int8" else float(ml_dtypes.finfo(_FP8).max)
        scale = np.maximum(rows.max(axis=1), -rows.min(axis=1)) / np.float32(most)
        return np.where(scale > 0, scale, np.float32(1))
    grid = rows.reshape(len(rows), -1, recipe.group)
    high, low = grid.max(axis=2), grid.min(axis=2)
    best, least = np.zeros(high.shape, np.int32), np.full(high.shape, np.inf, np.float32)
    for span in _SPANS:
        cut = (high - low) * np.float32((1 - span) / 2)
        scale = (high - low - 2 * cut) / np.float32(15)
        offset = low + cut + 8 * scale
        for fitted in (False, True):
            pair = _pairs(scale, offset)
            steps = _steps(grid, pair)
            wrong = _value(steps, pair) - grid
            error = np.einsum("rgi,rgi->rg", wrong, wrong)
            better = error < least
            best, least = np.where(better, pair, best), np.where(better, error, least)
            if not fitted:
                scale, offset = _fit(grid, steps, scale, offset)
    return best


def _fit(grid: np.ndarray, steps: np.ndarray, scale: np.ndarray, offset: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The scale and offset with which these steps come closest to the grid; as they are where all steps are equal."""
    mean, step_mean = grid.mean(axis=2), steps.mean(axis=2)
    spread = np.einsum("rgi,rgi->rg", steps, steps) - grid.shape[2] * step_mean**2
    together = np.einsum("rgi,rgi->rg", grid, steps) - grid.shape[2] * mean * step_mean
    fits = spread > 0
    scale = np.where(fits, together / np.where(fits, spread, 1), scale)
    return scale, np.where(fits, mean - scale * step_mean, offset)


def _pairs(scale: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Both as bfloat16 in a word, the scale in its high half; a scale of zero becomes one."""
    high = np.where(scale == 0, np.float32(1), scale).astype(ml_dtypes.bfloat16).view(np.uint16)
    low = offset.astype(ml_dtypes.bfloat16).view(np.uint16)
    return ((high.astype(np.uint32) << 16) | low).view(np.int32)


def _halves(pair: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale and offset, `[rows, groups, 1]` float32."""
    bits = pair.view(np.uint32)[..., None]
    return (bits & np.uint32(0xFFFF0000)).view(np.float32), (bits << np.uint32(16)).view(np.float32)


def _steps(grid: np.ndarray, pair: np.ndarray) -> np.ndarray:
    """The nearest of the sixteen steps, in [-8, 7]."""
    scale, offset = _halves(pair)
    return np.clip(np.rint((grid - offset) / scale), -8, 7)


def _value(steps: np.ndarray, pair: np.ndarray) -> np.ndarray:
    scale, offset = _halves(pair)
    return steps * scale + offset


def _pack(rows: np.ndarray, scale: np.ndarray, recipe: Recipe) -> np.ndarray:
    if recipe.format == "int8":
        return np.clip(np.rint(rows / scale[:, None]), -127, 127).astype(np.int8)
    if recipe.format == "fp8_row":
        most = float(ml_dtypes.finfo(_FP8).max)
        return np.clip(rows / scale[:, None], -most, most).astype(_FP8).view(np.uint8)
    nibbles = (_steps(rows.reshape(len(rows), -1, recipe.group), scale) + 8).astype(np.uint8).reshape(len(rows), -1)
    return (nibbles[:, ::2] | (nibbles[:, 1::2] << 4)).view("<i4")

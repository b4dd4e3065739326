"""Quantised formats of Hugging Face checkpoints, in numpy: how a weight is stored, and its values.

int4 (compressed-tensors, pack-quantized) stores weight `X` as `X_packed` int32 `[out, in/8]`, `X_scale`
`[out, in/group]` and `X_shape`; element i of a row is (nibble i - 8) * scale.
fp8 (by blocks) stores `X` e4m3 `[out, in]` and `X_scale_inv` float32 `[ceil(out/b), ceil(in/b)]`; q * scale.
mxfp4 (gpt-oss) stores `X_blocks` uint8 `[E, out, in/32, 16]` and `X_scales` uint8 `[E, out, in/32]`;
e2m1 * 2**(scale - 127).

The model calls the mxfp4 weight `X` and has it as `[E, in, out]`; the others are `[out, in]`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import ml_dtypes
import numpy as np

from pallas_kernels.quantised_matmul.formats import Format

Shape = tuple[int, ...]

_E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@dataclass(frozen=True)
class StoredFormat(ABC):
    """One way of storing weights; `group` elements along `in` share a scale."""

    group: int
    name: ClassVar[Format]
    per_item: ClassVar[int]  # elements in one item of the packed array
    packed_suffix: ClassVar[str]
    scale_suffix: ClassVar[str]
    other_suffixes: ClassVar[tuple[str, ...]] = ()
    in_axis: ClassVar[int] = -1  # axis of the weight, as a model has it, that is packed along; -2: stored transposed

    @abstractmethod
    def shape(self, packed: Shape, scale: Shape) -> Shape | None:
        """Shape of the weight as a model has it; None when the two do not belong together."""

    @abstractmethod
    def packed(self, stored: np.ndarray) -> np.ndarray:
        """The stored array as `[…, out, in / per_item]` in the dtype that device memory keeps."""

    def row_scales(self, stored: np.ndarray, rows: int) -> np.ndarray:
        """A scale for each row and group, `[…, out, in / group]`."""
        return stored

    @abstractmethod
    def decode(self, packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Float32 values `[…, out, in]` of what `packed` and `row_scales` return."""


@dataclass(frozen=True)
class Int4(StoredFormat):
    """compressed-tensors' pack-quantized: symmetric four-bit integers."""

    name = "int4"
    per_item = 8
    packed_suffix = "_packed"
    scale_suffix = "_scale"
    other_suffixes = ("_shape",)

    def shape(self, packed: Shape, scale: Shape) -> Shape | None:
        out, width = packed[0], packed[-1] * self.per_item
        return (out, width) if scale == (out, width // self.group) and width % self.group == 0 else None

    def packed(self, stored: np.ndarray) -> np.ndarray:
        return stored

    def decode(self, packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
        pairs = np.ascontiguousarray(packed).view(np.uint8)  # little-endian: the first element in the lowest bits
        values = np.empty((*pairs.shape[:-1], pairs.shape[-1] * 2), np.float32)
        values[..., ::2], values[..., 1::2] = pairs & 15, pairs >> 4
        values -= 8
        return _scale(values, scales.astype(np.float32))


@dataclass(frozen=True)
class Fp8(StoredFormat):
    """e4m3 values with one float32 scale a block of `group` x `group`, to multiply by."""

    name = "fp8"
    per_item = 1
    packed_suffix = ""
    scale_suffix = "_scale_inv"

    def shape(self, packed: Shape, scale: Shape) -> Shape | None:
        return packed if scale == tuple(-(-n // self.group) for n in packed) else None

    def packed(self, stored: np.ndarray) -> np.ndarray:
        return stored.view(np.uint8)

    def row_scales(self, stored: np.ndarray, rows: int) -> np.ndarray:
        return np.repeat(stored, self.group, axis=-2)[..., :rows, :]

    def decode(self, packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
        values = _E4M3[packed]
        return np.multiply(values, np.repeat(scales, self.group, axis=-1)[..., : values.shape[-1]], out=values)


@dataclass(frozen=True)
class Mxfp4(StoredFormat):
    """gpt-oss's experts: pairs of e2m1 with a power of two for 32 elements; a whole layer's experts in one tensor."""

    name = "mxfp4"
    per_item = 2
    in_axis = -2
    packed_suffix = "_blocks"
    scale_suffix = "_scales"

    def shape(self, packed: Shape, scale: Shape) -> Shape | None:
        experts, out, groups = packed[:3]
        return (experts, groups * self.group, out) if scale == packed[:3] and packed[3] == self.group // 2 else None

    def packed(self, stored: np.ndarray) -> np.ndarray:
        return stored.reshape(*stored.shape[:2], -1)

    def decode(self, packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
        values = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), np.float32)
        values[..., ::2], values[..., 1::2] = _E2M1[packed & 15], _E2M1[packed >> 4]
        return _scale(values, np.ldexp(np.float32(1), scales.astype(np.int32) - 127))


def _scale(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    grid = values.reshape(*scales.shape, values.shape[-1] // scales.shape[-1])
    np.multiply(grid, scales[..., None], out=grid)
    return values

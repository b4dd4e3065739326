"""Weights kept quantised in device memory.

A `QuantisedTensor` stands for a matrix `[..., out, in]` (PyTorch order: one row per output feature).
Any number of leading axes (layers, experts, gate/up) may stand before the matrix. The formats:

| format        | packed                    | scale                                        | value |
|---------------|---------------------------|----------------------------------------------|-------|
| `int8`        | int8 `[..., out, in]`     | float `[..., out]`                           | q * scale |
| `int4`        | int32 `[..., out, in/8]`  | float `[..., out, in/group]`                 | (nibble - 8) * scale |
| `int4_affine` | int32 `[..., out, in/8]`  | int32 `[..., out, in/group]`: two bfloat16   | the same + offset |
| `fp8`         | uint8 `[..., out, in]`    | float32 `[..., ceil(out/128), ceil(in/128)]` | e4m3fn * scale |
| `fp8_row`     | uint8 `[..., out, in]`    | float `[..., out]`                           | e4m3fn * scale |
| `mxfp4`       | uint8 `[..., out, in/2]`  | uint8 (e8m0) `[..., out, in/32]`             | e2m1 * 2**(scale - 127) |

fp8 scales may also come per row, `[..., out, ceil(in/128)]`, where rows do not begin at a block (a shard, a slice).
fp8 values are kept as bytes, since XLA for CPUs widens a whole float8 stack before it takes a slice of it.
int4_affine keeps the scale of a group in the high half of a word and its offset in the low half.
Element i of an int4 row is bits 4*(i mod 8) of word i//8; element i of an mxfp4 row is bits 4*(i mod 2) of byte i//2.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.quantised_matmul import codecs
from pallas_kernels.quantised_matmul.gguf_blocks import GGUF_BLOCKS, block_values

Format = Literal["int8", "int4", "int4_affine", "fp8", "fp8_row", "mxfp4", "q8_0", "q4_0", "q4_1", "q4_k"]
FORMATS: tuple[Format, ...] = ("int8", "int4", "int4_affine", "fp8", "fp8_row", "mxfp4")
ROW_SCALED: tuple[Format, ...] = ("int8", "fp8_row")
"""One scale a row, which multiplies the sum."""
GGUF_FORMATS = tuple(GGUF_BLOCKS)
"""Blocks of a GGUF file (see gguf_blocks.py), which hold their scales: the leaf `scale` is `[..., out, 0]`."""
FP8_BLOCK = 128
MXFP4_GROUP = 32
_PER_ITEM = {"int8": 1, "int4": 8, "int4_affine": 8, "fp8": 1, "fp8_row": 1, "mxfp4": 2}
_PACKED_DTYPE = {"int8": jnp.int8, "int4": jnp.int32, "int4_affine": jnp.int32}
"""Of the packed leaf; uint8 for all others."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=("packed", "scale"), meta_fields=("format", "group"))
@dataclasses.dataclass(frozen=True)
class QuantisedTensor:
    """A weight `[..., out, in]` in one of `FORMATS` or `GGUF_FORMATS`; a pytree whose leaves are `packed` and `scale`.

    `group` is how many elements of `in` share a scale (0: the whole row); fp8 blocks are `group` x `group`.
    """

    packed: Array
    scale: Array
    format: Format
    group: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix it stands for, leading axes included."""
        *leading, width = self.packed.shape
        values, items = _values_and_items(self.format)
        return (*leading, width // items * values)

    @property
    def ndim(self) -> int:
        return self.packed.ndim

    @property
    def nbytes(self) -> int:
        """Bytes of both leaves."""
        leaves = (self.packed, self.scale)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    def check(self) -> None:
        """Raises ValueError where dtype or shape of the leaves is not what the format says."""
        if self.format not in (*FORMATS, *GGUF_FORMATS):
            known = ", ".join((*FORMATS, *GGUF_FORMATS))
            raise ValueError(f"weight format {self.format!r} is unknown: use one of {known}")
        wanted = _PACKED_DTYPE.get(self.format, jnp.uint8)
        if self.packed.dtype != wanted:
            raise ValueError(
                f"{self.format} weights are stored as {jnp.dtype(wanted).name}, got {self.packed.dtype.name}"
            )
        expected = scale_shape(self.shape, self.format, self.group)
        per_row = (*self.shape[:-1], *expected[-1:])
        if self.scale.shape not in (expected, per_row if self.format == "fp8" else expected):
            raise ValueError(
                f"a {self.format} weight {self.shape} in groups of {self.group} needs scales of shape"
                f" {expected}, got {self.scale.shape}"
            )


def scale_shape(shape: tuple[int, ...], format: Format, group: int) -> tuple[int, ...]:
    """Shape of the scales of a matrix `[..., out, in]`."""
    *leading, n_out, n_in = shape
    if format in ROW_SCALED:
        return (*leading, n_out)
    if format in GGUF_FORMATS:
        return (*leading, n_out, 0)
    if group < 1:
        raise ValueError(f"{format} weights are scaled in groups: got group={group}, use 32 or more")
    if format == "fp8":
        return (*leading, -(-n_out // group), -(-n_in // group))
    if n_in % group:
        raise ValueError(f"{format} needs in_features divisible by its group of {group}, got {n_in}")
    return (*leading, n_out, n_in // group)


def packed_shape(shape: tuple[int, ...], format: Format) -> tuple[tuple[int, ...], jnp.dtype]:
    """Shape and dtype in which a matrix `[..., out, in]` is stored."""
    *leading, n_in = shape
    values, items = _values_and_items(format)
    if n_in % values:
        raise ValueError(f"{format} packs {values} elements together: in_features is {n_in}, not a multiple")
    return (*leading, n_in // values * items), jnp.dtype(_PACKED_DTYPE.get(format, jnp.uint8))


def _values_and_items(format: Format) -> tuple[int, int]:
    """How many elements of a row are packed together, and in how many items."""
    return GGUF_BLOCKS[format] if format in GGUF_FORMATS else (_PER_ITEM[format], 1)


def default_group(format: Format) -> int:
    """Group size used where the caller names none."""
    if format in GGUF_FORMATS:
        return 0
    return {"int8": 0, "int4": 32, "int4_affine": 32, "fp8": FP8_BLOCK, "fp8_row": 0, "mxfp4": MXFP4_GROUP}[format]


def abstract(
    shape: tuple[int, ...], format: Format, *, group: int | None = None, scale_dtype=jnp.float32
) -> QuantisedTensor:
    """A QuantisedTensor of `jax.ShapeDtypeStruct`s, for ahead-of-time compiles and loading."""
    group = default_group(format) if group is None else group
    stored, dtype = packed_shape(shape, format)
    if format in ("mxfp4", *GGUF_FORMATS):
        scale_dtype = jnp.uint8
    elif format == "int4_affine":
        scale_dtype = jnp.int32
    scale: Any = jax.ShapeDtypeStruct(scale_shape(shape, format, group), scale_dtype)
    packed: Any = jax.ShapeDtypeStruct(stored, dtype)
    return QuantisedTensor(packed, scale, format, group)


def slice_leading(weight, starts, sizes):
    """`lax.dynamic_slice` of the leading axes of every leaf of an array or a quantised weight."""

    def cut(leaf):
        rest = leaf.ndim - len(starts)
        return jax.lax.dynamic_slice(leaf, (*starts, *([0] * rest)), (*sizes, *leaf.shape[len(starts) :]))

    return jax.tree.map(cut, weight)


def expand_scale(t: QuantisedTensor) -> Float[Array, "... out in"]:
    """The scale of every element in float32 (out and in may be 1 where the scale does not vary)."""
    if t.format in ROW_SCALED:
        return t.scale.astype(jnp.float32)[..., None]
    if t.format == "mxfp4":
        scale = codecs.e8m0_to_float(t.scale)
    elif t.format == "int4_affine":
        scale = codecs.unpack_pair(t.scale)[0]
    else:
        scale = t.scale.astype(jnp.float32)
    scale = jnp.repeat(scale, t.group, axis=-1)[..., : t.shape[-1]]
    if t.format == "fp8" and scale.shape[-2] != t.shape[-2]:
        scale = jnp.repeat(scale, t.group, axis=-2)[..., : t.shape[-2], :]
    return scale


def unpack(t: QuantisedTensor) -> Float[Array, "... out in"]:
    """The unscaled elements in float32."""
    if t.format in ("int4", "int4_affine"):
        return codecs.unpack_int4(t.packed).astype(jnp.float32)
    if t.format == "mxfp4":
        return codecs.unpack_e2m1(t.packed)
    if t.format in ("fp8", "fp8_row"):
        return jax.lax.bitcast_convert_type(t.packed, jnp.float8_e4m3fn).astype(jnp.float32)
    return t.packed.astype(jnp.float32)


def dequantise(t: QuantisedTensor, dtype=jnp.float32) -> Float[Array, "... out in"]:
    """The matrix it stands for: scaled in float32, rounded once to `dtype`."""
    if t.format in GGUF_FORMATS:
        return block_values(t.packed, t.format).astype(dtype)
    values = unpack(t) * expand_scale(t)
    if t.format == "int4_affine":
        values += jnp.repeat(codecs.unpack_pair(t.scale)[1], t.group, axis=-1)
    return values.astype(dtype)


def quantise(w: Float[Array, "... out in"], format: Format, *, group: int | None = None) -> QuantisedTensor:
    """Rounds `w` to the nearest representable values.

    int8 and int4 scales have the dtype of `w`, fp8 scales are float32; int4_affine spans a group from its least value
    to its greatest.

    Raises ValueError where in_features does not fit the format's group.
    """
    group = default_group(format) if group is None else group
    needed = scale_shape(w.shape, format, group)
    values = w.astype(jnp.float32)
    if format == "int8":
        scale = _nonzero(jnp.max(jnp.abs(values), axis=-1) / 127).astype(w.dtype)
        packed = jnp.clip(jnp.round(values / scale.astype(jnp.float32)[..., None]), -127, 127).astype(jnp.int8)
        return QuantisedTensor(packed, scale, format, 0)
    if format in ("fp8", "fp8_row"):
        absmax = _block_absmax(values, group) if format == "fp8" else jnp.max(jnp.abs(values), axis=-1)
        scale = _nonzero(absmax / codecs.E4M3_MAX)
        t = QuantisedTensor(w, scale, format, group)
        packed = jnp.clip(values / expand_scale(t), -codecs.E4M3_MAX, codecs.E4M3_MAX)
        bits = jax.lax.bitcast_convert_type(packed.astype(jnp.float8_e4m3fn), jnp.uint8)
        return dataclasses.replace(t, packed=bits)
    grouped = values.reshape(*needed, group)
    if format == "int4_affine":
        low, high = jnp.min(grouped, axis=-1), jnp.max(grouped, axis=-1)
        scale = _nonzero((high - low) / 15)
        pair = codecs.pack_pair(scale, low + 8 * scale)
        scale, offset = codecs.unpack_pair(pair)
        nibbles = jnp.clip(jnp.round((grouped - offset[..., None]) / scale[..., None]), -8, 7)
        return QuantisedTensor(codecs.pack_int4(nibbles.astype(jnp.int32).reshape(w.shape)), pair, format, group)
    absmax = jnp.max(jnp.abs(grouped), axis=-1)
    if format == "int4":
        scale = _nonzero(absmax / 7).astype(w.dtype)
        nibbles = jnp.clip(jnp.round(grouped / scale.astype(jnp.float32)[..., None]), -8, 7)
        return QuantisedTensor(codecs.pack_int4(nibbles.astype(jnp.int32).reshape(w.shape)), scale, format, group)
    scale = codecs.e8m0_for(absmax)
    scaled = grouped / codecs.e8m0_to_float(scale)[..., None]
    return QuantisedTensor(codecs.pack_e2m1(scaled.reshape(w.shape)), scale, format, group)


def _nonzero(scale: Array) -> Array:
    return jnp.where(scale > 0, scale, 1.0)


def _block_absmax(values: Array, block: int) -> Array:
    *leading, n_out, n_in = values.shape
    pad = [(0, 0)] * len(leading) + [(0, -n_out % block), (0, -n_in % block)]
    padded = jnp.pad(jnp.abs(values), pad)
    rows, columns = padded.shape[-2] // block, padded.shape[-1] // block
    return padded.reshape(*leading, rows, block, columns, block).max(axis=(-3, -1))

"""Tiles of a quantised weight inside a TPU kernel.

A packed word holds neighbouring elements of a row. A kernel does not spread them out: it splits the activations
instead, outside the kernel, into as many planes as a word has elements (`split_planes`), and multiplies plane j by
the elements j of all words.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.quantised_matmul.codecs import e2m1_to_float, e4m3_to_float, e8m0_to_float, unpack_pair
from pallas_kernels.quantised_matmul.formats import QuantisedTensor

HIGHEST = jax.lax.Precision.HIGHEST


def plane_count(weight: Array | QuantisedTensor) -> int:
    """Elements in a packed word."""
    if not isinstance(weight, QuantisedTensor):
        return 1
    return {"int4": 8, "int4_affine": 8, "mxfp4": 2}.get(weight.format, 1)


def split_planes(x: Float[Array, "T in"], planes: int) -> Float[Array, "planes T in/planes"]:
    """Plane j holds the columns j, j + planes, j + 2 * planes, …"""
    tokens, width = x.shape
    return x.reshape(tokens, width // planes, planes).transpose(2, 0, 1)


def swapped(leaf: Array) -> bool:
    """Whether a kernel reads the last two axes of an operand swapped.

    A TPU pads the last axis of an array to 128 and the one before to a sublane tile. XLA lays out the arguments of
    a program so that this wastes least; a kernel that insisted on the other order would have the array copied.
    """
    tile = 32 // leaf.dtype.itemsize
    *_, rows, columns = leaf.shape
    padded = -(-rows // tile) * tile * (-(-columns // 128) * 128)
    padded_when_swapped = -(-columns // tile) * tile * (-(-rows // 128) * 128)
    return padded_when_swapped < padded


def major_to_minor(leaf: Array) -> tuple[int, ...]:
    """The layout of a weight leaf that spares the kernels a copy, for `jax.experimental.layout.Layout`.

    It is XLA's own choice for most shapes; `tpu_layouts.as_kernels_read` asks for it where it is not.
    """
    order = tuple(range(leaf.ndim))
    return (*order[:-2], order[-1], order[-2]) if swapped(leaf) else order


def dot(x: Float[Array, "T in"], w: Array, w_axis: int = 1) -> Float[Array, "T out"]:
    """x @ w.T in float32; `w_axis` is the axis of w that is summed over."""
    return jax.lax.dot_general(
        x,
        w,
        (((1,), (w_axis,)), ((), ())),
        precision=HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def multiply(
    x: Callable[[int], Float[Array, "T n"]],
    packed: Array,
    scale: Any,
    *,
    format: str | None,
    group: int,
    first_row: Array | int,
    packed_swapped: bool,
    scale_swapped: bool,
) -> Float[Array, "T rows"]:
    """Product of activations and one tile of whole rows of a weight, in float32.

    Args:
      x: gives the plane of a number.
      packed: the tile. scale: for int4 and mxfp4 the scales of its rows, for fp8 those of the whole matrix, for
        int8 and fp8_row one for each of its rows.
      first_row: number of the tile's first row in the matrix.
      packed_swapped, scale_swapped: whether they come with their two axes swapped.
    """
    dtype, word_axis = x(0).dtype, 0 if packed_swapped else 1
    if format is None:
        return dot(x(0), packed.astype(dtype), word_axis)
    if format == "int8":
        return dot(x(0), packed.astype(jnp.float32).astype(dtype), word_axis) * scale.astype(jnp.float32)
    if format == "fp8_row":
        values = e4m3_to_float(packed.astype(jnp.int32)).astype(dtype)
        return dot(x(0), values, word_axis) * scale.astype(jnp.float32)
    if format == "fp8":
        return _multiply_fp8(x(0), packed, scale, group, first_row)
    if format == "mxfp4":
        # e2m1 and powers of two are exact in bfloat16, whose exponents are those of float32
        scale = e8m0_to_float(scale.astype(jnp.int32)).astype(jnp.bfloat16)
        words, decode, planes = packed.astype(jnp.int32), e2m1_to_float, 2
    else:
        words, decode, planes = packed, lambda nibble: (nibble - 8).astype(jnp.float32), 8
    axes = words.shape[word_axis], 0 if scale_swapped else 1, word_axis
    offsets: Any = None
    if format == "int4_affine":
        scale, offset = (half.astype(jnp.bfloat16) for half in unpack_pair(scale))
        offsets = spread(offset, *axes)
    scales = spread(scale, *axes)
    total: Any = None
    for j in range(planes):
        nibbles = jax.lax.shift_right_logical(words, jnp.int32(4 * j)) & 15
        values = decode(nibbles) * scales
        part = dot(x(j), (values if offsets is None else values + offsets).astype(dtype), word_axis)
        total = part if total is None else total + part
    return total


def spread(scale: Array, words: int, group_axis: int, word_axis: int) -> Array:
    """Each scale repeated for the words of its group, in float32: a product with zeros and ones, hence exact.

    Args:
      scale: rows and groups, the groups along `group_axis`.
      words: words of a row; they come out along `word_axis`.
    """
    groups = scale.shape[group_axis]
    word_group = jax.lax.broadcasted_iota(jnp.int32, (groups, words), 1) // (words // groups)
    chosen = word_group == jax.lax.broadcasted_iota(jnp.int32, (groups, words), 0)
    ones = chosen.astype(jnp.float32).astype(scale.dtype)
    pair, axes = ((scale, ones), (group_axis, 0)) if word_axis else ((ones, scale), (0, group_axis))
    return jax.lax.dot_general(
        *pair,
        (((axes[0],), (axes[1],)), ((), ())),
        precision=HIGHEST if scale.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _multiply_fp8(x, packed, scale, block, first_row):
    rows, blocks = packed.shape[0], scale.shape[0]
    row = first_row + jax.lax.broadcasted_iota(jnp.int32, (rows, blocks), 0)
    chosen = row // block == jax.lax.broadcasted_iota(jnp.int32, (rows, blocks), 1)
    by_row = jnp.dot(chosen.astype(jnp.float32), scale, precision=HIGHEST, preferred_element_type=jnp.float32)
    total: Any = None
    for i in range(scale.shape[1]):
        columns = slice(i * block, min((i + 1) * block, packed.shape[1]))
        values = e4m3_to_float(packed[:, columns].astype(jnp.int32)) * by_row[:, i : i + 1]
        part = dot(x[:, columns], values.astype(x.dtype))
        total = part if total is None else total + part
    return total

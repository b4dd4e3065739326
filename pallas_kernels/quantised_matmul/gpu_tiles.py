"""Tiles of a product with a quantised weight inside a Triton kernel."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.quantised_matmul.codecs import e2m1_to_float, e4m3_to_float, unpack_pair
from pallas_kernels.quantised_matmul.formats import ROW_SCALED, QuantisedTensor
from pallas_kernels.quantised_matmul.tiles import plane_count

STEP_WORDS = {None: 64, "int8": 64, "fp8": 64, "fp8_row": 64, "mxfp4": 64, "int4": 32, "int4_affine": 32}


@dataclass(frozen=True)
class Weight:
    """What a kernel knows of a weight when it is compiled; its arrays are flattened to rows `[…*out, words]`."""

    format: str | None
    words: int  # of a row
    words_per_scale: int
    rows: int  # of a matrix
    rows_per_scale: int
    scale_rows: int  # of a matrix
    planes: int

    @classmethod
    def of(cls, weight: Array | QuantisedTensor) -> "Weight":
        quantised = isinstance(weight, QuantisedTensor)
        packed = weight.packed if quantised else weight
        planes, rows, words = plane_count(weight), packed.shape[-2], packed.shape[-1]
        if not quantised or weight.format in ROW_SCALED:
            return cls(weight.format if quantised else None, words, words, rows, 1, rows, planes)
        scale_rows = weight.scale.shape[-2]
        return cls(
            weight.format,
            words,
            weight.group // planes,
            rows,
            1 if scale_rows == rows else weight.group,
            scale_rows,
            planes,
        )


def flatten(weight: Array | QuantisedTensor) -> tuple[Array, ...]:
    """The arrays of a weight as `product` reads them."""
    if not isinstance(weight, QuantisedTensor):
        return (weight.reshape(-1, weight.shape[-1]),)
    scale = (
        weight.scale.reshape(-1) if weight.format in ROW_SCALED else weight.scale.reshape(-1, weight.scale.shape[-1])
    )
    return weight.packed.reshape(-1, weight.packed.shape[-1]), scale


def product(
    x: Any,
    x_rows: Int[Array, " t"],
    x_real: Bool[Array, " t"],
    arrays: tuple[Any, ...],
    matrix: Int[Array, ""],
    out_rows: Int[Array, " f"],
    weight: Weight,
) -> Float[Array, "t f"]:
    """Rows of x times the rows `out_rows` of a matrix of the flattened weight, summed in float32.

    Args:
      x: activations split into planes, `[planes * N, words]`.
      x_rows, x_real: which rows of a plane; those that are not real count as zero.
      arrays: references to what `flatten` gives. matrix: number of the matrix among all.
      out_rows: rows of the matrix; those at and past its end count as zero.
    """
    dtype, step = x.dtype, STEP_WORDS[weight.format]
    plane_rows = x.shape[0] // weight.planes
    real_out = out_rows < weight.rows
    packed_row = matrix * weight.rows + out_rows
    scale_row = matrix * weight.scale_rows + out_rows // weight.rows_per_scale
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None

    def body(i, total):
        word = i * step + jnp.arange(step, dtype=jnp.int32)
        inside = word < weight.words
        mask = both(real_out, inside)
        tile = plgpu.load(arrays[0].at[grid(packed_row, word)], mask=mask, other=0)
        scale = offset = None
        if weight.format not in (None, *ROW_SCALED):
            place = grid(scale_row, word // weight.words_per_scale)
            scale = plgpu.load(arrays[1].at[place], mask=mask, other=0)
            if weight.format == "int4_affine":
                scale, offset = unpack_pair(scale)
            else:
                scale = _scale_values(scale, weight.format)
        for j in range(weight.planes):
            values = _elements(tile, weight.format, j)
            values = values if scale is None else values * scale
            values = values if offset is None else values + offset
            x_tile = plgpu.load(x.at[grid(j * plane_rows + x_rows, word)], mask=both(x_real, inside), other=0)
            total += jax.lax.dot_general(
                x_tile,
                values.astype(dtype),
                (((1,), (1,)), ((), ())),
                precision=precision,
                preferred_element_type=jnp.float32,
            )
        return total

    start = jnp.zeros((x_rows.shape[0], out_rows.shape[0]), jnp.float32)
    total = jax.lax.fori_loop(0, -(-weight.words // step), body, start)
    if weight.format in ROW_SCALED:
        scale = plgpu.load(arrays[1].at[packed_row], mask=real_out, other=0)
        total = total * scale.astype(jnp.float32)[None, :]
    return total


def _elements(tile: Array, format: str | None, plane: int) -> Array:
    """Unscaled elements `plane` of the words of a tile."""
    if format is None:
        return tile
    if format == "int8":
        return tile.astype(jnp.float32)
    if format in ("fp8", "fp8_row"):
        return e4m3_to_float(tile.astype(jnp.int32))
    nibbles = jax.lax.shift_right_logical(tile.astype(jnp.int32), jnp.full(tile.shape, 4 * plane, jnp.int32)) & 15
    return e2m1_to_float(nibbles) if format == "mxfp4" else (nibbles - 8).astype(jnp.float32)


def _scale_values(scale: Array, format: str) -> Float[Array, "..."]:
    if format != "mxfp4":
        return scale.astype(jnp.float32)
    # a zero exponent (2**-127) is left out: it would need a subnormal
    return jax.lax.bitcast_convert_type(scale.astype(jnp.int32) << 23, jnp.float32)


def grid(column: Array, row: Array) -> tuple[Array, Array]:
    """Both index vectors spread over the tile that they span."""
    shape = (column.shape[0], row.shape[0])
    return jax.lax.broadcast_in_dim(column, shape, (0,)), jax.lax.broadcast_in_dim(row, shape, (1,))


def both(column: Bool[Array, " a"], row: Bool[Array, " b"]) -> Bool[Array, "a b"]:
    """Where both masks hold."""
    a, b = grid(column, row)
    return a & b

"""Expert matmuls on TPU (Mosaic).

Rows are sorted by expert and cut into tiles; the grid visits the pairs of an expert and a tile that holds rows of
it. Visits of one expert stand beside each other, so that each tile of its weight is fetched once; a tile of rows
that several experts share stays in VMEM while they fill in their rows one after another.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.common.varying import result_like, vary_together
from pallas_kernels.grouped_matmul.activations import ACTIVATIONS
from pallas_kernels.grouped_matmul.routing import visit_tiles
from pallas_kernels.quantised_matmul import tiles
from pallas_kernels.quantised_matmul.formats import ROW_SCALED, QuantisedTensor
from pallas_kernels.quantised_matmul.tpu import VMEM_LIMIT, as_read, reads_swapped, refusal_of_weight, row_tile

LEAST_TILE, MOST_TILE, FEWER_COLUMNS = 16, 256, 1


def refusal(x: Array, *weights: Array | QuantisedTensor) -> str | None:
    """Why the kernel cannot run these arguments, None where it can."""
    if x.dtype == jnp.float16:
        return "TPUs do not multiply float16; use bfloat16."
    reasons = [refusal_of_weight(weight) for weight in weights]
    return next((reason for reason in reasons if reason), None)


def project(
    x: Float[Array, "planes N n"],
    weight: Array | QuantisedTensor,
    bias: Array | None,
    group_sizes: Int[Array, "E"],
    tile: int,
    layer: Int[Array, ""] | None,
    activation: str | None,
    columns: tuple[Int[Array, ""], int] | None = None,
    *,
    interpret,
) -> Float[Array, "N F"]:
    """Rows times the weight of their group; with an activation, gate and up halves `[L, E, 2, F, M]` combined.

    Rows of tiles without a visit are left as they were. `tile` divides N. columns: the first and the number of those
    wanted, which is a multiple of 128 and divides the first; None: all.
    """
    if layer is None:
        weight, bias = jax.tree.map(lambda leaf: leaf[None], (weight, bias))
        layer = jnp.int32(0)
    quantised = isinstance(weight, QuantisedTensor)
    packed: Any = weight.packed if quantised else weight
    scale: Any = weight.scale if quantised else None
    format, group = (weight.format, weight.group) if quantised else (None, 0)
    (planes, rows, _), (n_out, n_in) = x.shape, weight.shape[-2:]
    f_tile = row_tile(n_out, n_in, packed.dtype.itemsize if format is None else 1, quantised)
    start, width = columns or (jnp.int32(0), n_out)
    if columns is not None:
        f_tile = math.gcd(f_tile, width)
    visits = visit_tiles(group_sizes, rows, tile)
    halves = () if activation is None else (2,)
    zeros = (0,) * len(halves)

    def of_rows(leaf):
        """Whole rows of the visited expert: those of the tile's output features."""
        width, turned = leaf.shape[-1], reads_swapped(format, leaf)
        shape = (None, None, *halves, *((width, f_tile) if turned else (f_tile, width)))
        return pl.BlockSpec(
            shape,
            lambda f, v, layer, first, group, *_: (
                layer[0],
                group[v],
                *zeros,
                *((0, first[0] + f) if turned else (first[0] + f, 0)),
            ),
        )

    def of_features(leaf):
        """One value for each output feature; all experts where there is no other axis to fill a block."""
        if halves:
            return pl.BlockSpec((None, 2, f_tile), lambda f, v, layer, first, group, *_: (group[v], 0, first[0] + f))
        return pl.BlockSpec((leaf.shape[0], f_tile), lambda f, v, layer, first, *_: (0, first[0] + f))

    rows_spec = pl.BlockSpec((planes, tile, x.shape[2]), lambda f, v, layer, first, group, tile, *_: (0, tile[v], 0))
    operands, specs = [x, as_read(format, packed)], [rows_spec, of_rows(packed)]
    if format in ROW_SCALED:
        operands.append(_one_layer(scale, layer))
        specs.append(of_features(operands[-1]))
    elif format == "fp8":
        shape = (None, None, *halves, *scale.shape[-2:])
        operands.append(scale)
        specs.append(pl.BlockSpec(shape, lambda f, v, layer, first, group, *_: (layer[0], group[v], *zeros, 0, 0)))
    elif quantised:
        operands.append(as_read(format, scale))
        specs.append(of_rows(scale))
    if bias is not None:
        operands.append(_one_layer(bias, layer))
        specs.append(of_features(operands[-1]))
    multiply = functools.partial(
        tiles.multiply,
        format=format,
        group=group,
        packed_swapped=reads_swapped(format, packed),
        scale_swapped=quantised and reads_swapped(format, scale),
    )
    operands = vary_together(layer[None], (start // f_tile)[None], *visits, *operands)
    return pl.pallas_call(
        functools.partial(
            _kernel,
            multiply=multiply,
            activation=activation,
            has_scale=quantised,
            scale_by_feature=format in ROW_SCALED,
            has_bias=bias is not None,
        ),
        out_shape=result_like((rows, width), x.dtype, *operands),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            grid=(pl.cdiv(width, f_tile), visits.group.shape[0]),
            in_specs=specs,
            out_specs=pl.BlockSpec((tile, f_tile), lambda f, v, layer, first, group, tile, *_: (tile[v], f)),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        interpret=interpret,
        name=f"grouped_matmul_{format or packed.dtype.name}_{activation or 'plain'}",
    )(*operands)


def _one_layer(leaf: Array, layer: Int[Array, ""]) -> Float[Array, "..."]:
    return jax.lax.dynamic_index_in_dim(leaf, layer, 0, keepdims=False).astype(jnp.float32)


def _kernel(
    layer_ref,
    first_ref,
    group_ref,
    tile_ref,
    low_ref,
    high_ref,
    x_ref,
    packed_ref,
    *refs,
    multiply,
    activation,
    has_scale,
    scale_by_feature,
    has_bias,
):
    del layer_ref
    *extra, y_ref = refs
    scale_ref: Any = extra[0] if has_scale else None
    bias_ref: Any = extra[-1] if has_bias else None
    visit = pl.program_id(1)
    expert, low, high = group_ref[visit], low_ref[visit], high_ref[visit]
    first_row = (first_ref[0] + pl.program_id(0)) * y_ref.shape[1]
    new_tile = (visit == 0) | (tile_ref[visit] != tile_ref[jnp.maximum(visit - 1, 0)])

    def features(ref, half):
        return ref[pl.ds(half if activation else expert, 1), :]

    def project(half):
        part = (half,) if activation else ()
        scale = None
        if has_scale:
            scale = features(scale_ref, half) if scale_by_feature else scale_ref[part]
        y = multiply(lambda j: x_ref[j], packed_ref[part], scale, first_row=first_row)
        return y if bias_ref is None else y + features(bias_ref, half)

    @pl.when(high > low)
    def _():
        y = project(0) if activation is None else ACTIVATIONS[activation](project(0), project(1))
        row = jax.lax.broadcasted_iota(jnp.int32, y.shape, 0)
        kept = jnp.where(new_tile, jnp.zeros_like(y_ref[...]), y_ref[...])
        y_ref[...] = jnp.where((row >= low) & (row < high), y.astype(y_ref.dtype), kept)

"""Expert matmuls on GPU (Triton): a program has a block of rows of one expert and a tile of its output features."""

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.common.varying import result_like, vary_together
from pallas_kernels.grouped_matmul.activations import ACTIVATIONS
from pallas_kernels.grouped_matmul.routing import split_groups
from pallas_kernels.quantised_matmul import gpu_tiles
from pallas_kernels.quantised_matmul.formats import QuantisedTensor
from pallas_kernels.quantised_matmul.gpu import OUT_TILE, STAGES, refusal_of_weight

MOST_TILE = 64
FEWER_COLUMNS = 2
"""Slices of fewer columns are more launches and no more reading."""


def refusal(x: Array, *weights: Array | QuantisedTensor) -> str | None:
    """Why the kernel cannot run these arguments, None where it can."""
    del x
    return next((reason for reason in map(refusal_of_weight, weights) if reason), None)


def project(
    x: Float[Array, "planes N n"],
    weight: Array | QuantisedTensor,
    bias: Array | None,
    group_sizes: Int[Array, " E"],
    tile: int,
    layer: Int[Array, ""] | None,
    activation: str | None,
    columns: tuple[Int[Array, ""], int] | None = None,
    *,
    interpret: bool,
) -> Float[Array, "N F"]:
    """Rows times the weight of their group; with an activation, gate and up halves `[L, E, 2, F, M]` combined.

    Rows of no group are left as they were. columns: the first and the number of those wanted; None: all.
    """
    layer = jnp.int32(0) if layer is None else layer
    rows, experts = x.shape[1], group_sizes.shape[0]
    form = gpu_tiles.Weight.of(weight)
    blocks = split_groups(group_sizes, rows, tile)
    arrays = gpu_tiles.flatten(weight)
    extra = () if bias is None else (bias.reshape(-1),)
    start, width = columns or (jnp.int32(0), form.rows)
    meta = jnp.stack([layer, blocks.count, start]).astype(jnp.int32)
    operands = vary_together(meta, blocks.group, blocks.start, blocks.size, x.reshape(-1, form.words), *arrays, *extra)
    return pl.pallas_call(
        functools.partial(
            _kernel,
            weight=form,
            tile=tile,
            experts=experts,
            activation=activation,
            has_bias=bias is not None,
        ),
        out_shape=result_like((rows, width), x.dtype, *operands),
        grid=(blocks.group.shape[0], pl.cdiv(width, OUT_TILE)),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=STAGES),
        interpret=interpret,
        name=f"grouped_matmul_{form.format or 'plain'}_{activation or 'plain'}",
    )(*operands)


def _kernel(meta, group, start, size, x, *refs, weight, tile, experts, activation, has_bias):
    *refs, y = refs
    bias = refs.pop() if has_bias else None
    block = pl.program_id(0)
    column = pl.program_id(1) * OUT_TILE + jnp.arange(OUT_TILE, dtype=jnp.int32)
    feature = meta[2] + column
    in_row = feature < weight.rows
    halves = 1 if activation is None else 2

    @pl.when(block < meta[1])
    def _():
        row = start[block] + jnp.arange(tile, dtype=jnp.int32)
        real = jnp.arange(tile, dtype=jnp.int32) < size[block]

        def half(number):
            matrix = (meta[0] * experts + group[block]) * halves + number
            y = gpu_tiles.product(x, row, real, tuple(refs), matrix, feature, weight)
            if bias is None:
                return y
            added = plgpu.load(bias.at[matrix * weight.rows + feature], mask=in_row, other=0)
            return y + added.astype(jnp.float32)[None, :]

        value = half(0) if activation is None else ACTIVATIONS[activation](half(0), half(1))
        place = gpu_tiles.grid(row, column)
        plgpu.store(y.at[place], value.astype(y.dtype), mask=gpu_tiles.both(real, in_row))

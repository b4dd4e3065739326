"""Weight-only quantised matmul on TPU (Mosaic): a weight tile is read once and dequantised in VMEM."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.common.varying import result_like, vary_together
from pallas_kernels.quantised_matmul import tiles
from pallas_kernels.quantised_matmul.formats import GGUF_FORMATS, ROW_SCALED, QuantisedTensor
from pallas_kernels.quantised_matmul.tpu_layouts import TURNED

VMEM_LIMIT = 60 << 20
TILE_BYTES = 4 << 20
TILE_ELEMENTS = 2 << 20
MOST_TOKENS = 256


def refusal(x: Array, weight: QuantisedTensor) -> str | None:
    """Why the kernel cannot run these arguments, None where it can."""
    if x.dtype == jnp.float16:
        return "TPUs do not multiply float16; use bfloat16."
    return refusal_of_weight(weight)


def refusal_of_weight(weight: Array | QuantisedTensor) -> str | None:
    """Why a weight tile cannot be dequantised in VMEM, None where it can."""
    if not isinstance(weight, QuantisedTensor):
        return None
    if weight.format in GGUF_FORMATS:
        return f"{weight.format} blocks of a GGUF are multiplied natively on CPUs only."
    if weight.format == "fp8" and (weight.group != 128 or weight.scale.shape[-2] == weight.shape[-2]):
        return f"fp8 scales must be given for blocks of 128x128, got {weight.scale.shape} for {weight.shape}."
    return None


def quantised_matmul(
    x: Float[Array, "T in"],
    weight: QuantisedTensor,
    *,
    layer: Int[Array, ""] | None,
    interpret,
) -> Float[Array, "T out"]:
    """See `api.quantised_matmul`."""
    n_out, n_in = weight.shape[-2:]
    if layer is None:
        weight, layer = jax.tree.map(lambda leaf: leaf[None], weight), jnp.int32(0)
    planes = tiles.plane_count(weight)
    tokens = min(MOST_TOKENS, -(-x.shape[0] // 16) * 16)
    rows = row_tile(n_out, n_in, 1, quantised=True)
    padded = jnp.pad(x, ((0, -x.shape[0] % tokens), (0, 0)))
    inputs = tiles.split_planes(padded, planes)

    def of_rows(leaf):
        width, turned = leaf.shape[-1], reads_swapped(weight.format, leaf)
        shape = (width, rows) if turned else (rows, width)
        return pl.BlockSpec((None, *shape), lambda o, t, layer: (layer[0], *((0, o) if turned else (o, 0))))

    if weight.format in ROW_SCALED:
        scale = jax.lax.dynamic_slice_in_dim(weight.scale, layer, 1)
        scale_spec = pl.BlockSpec((1, rows), lambda o, t, layer: (0, o))
    elif weight.format == "fp8":
        scale = weight.scale
        scale_spec = pl.BlockSpec((None, *scale.shape[1:]), lambda o, t, layer: (layer[0], 0, 0))
    else:
        scale, scale_spec = as_read(weight.format, weight.scale), of_rows(weight.scale)
    packed = as_read(weight.format, weight.packed)
    operands = vary_together(layer[None], inputs, packed, scale)
    kernel = functools.partial(
        tiles.multiply,
        format=weight.format,
        group=weight.group,
        packed_swapped=reads_swapped(weight.format, weight.packed),
        scale_swapped=reads_swapped(weight.format, weight.scale),
    )
    y = pl.pallas_call(
        functools.partial(_kernel, multiply=kernel, rows=rows),
        out_shape=result_like((padded.shape[0], n_out), x.dtype, *operands),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(n_out, rows), padded.shape[0] // tokens),
            in_specs=[
                pl.BlockSpec((planes, tokens, n_in // planes), lambda o, t, layer: (0, t, 0)),
                of_rows(weight.packed),
                scale_spec,
            ],
            out_specs=pl.BlockSpec((tokens, rows), lambda o, t, layer: (t, o)),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        interpret=interpret,
        name=f"quantised_matmul_{weight.format}",
    )(*operands)
    return y[: x.shape[0]]


def _kernel(layer_ref, x_ref, packed_ref, scale_ref, y_ref, *, multiply, rows):
    del layer_ref
    y = multiply(lambda j: x_ref[j], packed_ref[...], scale_ref[...], first_row=pl.program_id(0) * rows)
    y_ref[...] = y.astype(y_ref.dtype)


def reads_swapped(format: str | None, leaf: Array) -> bool:
    """Whether a kernel reads a leaf of a weight of this format with its last two axes swapped."""
    return format in TURNED and tiles.swapped(leaf)


def as_read(format: str | None, leaf: Array) -> Array:
    """The leaf in the order in which a kernel reads it; free where the array is laid out so."""
    return jnp.swapaxes(leaf, -1, -2) if reads_swapped(format, leaf) else leaf


def row_tile(n_out: int, n_in: int, itemsize: int, quantised: bool) -> int:
    """Rows of a weight tile: all of them, or a power of two from 128 to 1024 that keeps the tile within its budget.

    The budget is memory for a plain weight and elements, each of which takes some instructions, for a quantised one.
    """
    rows = 1024
    while rows > 128 and rows * n_in * itemsize > (TILE_ELEMENTS if quantised else TILE_BYTES):
        rows //= 2
    return n_out if n_out <= rows else rows

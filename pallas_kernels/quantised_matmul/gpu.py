"""Weight-only quantised matmul on GPU (Triton): tiles of the weight are dequantised in registers."""

import functools
import math

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.common.varying import result_like, vary_together
from pallas_kernels.quantised_matmul import gpu_tiles, tiles
from pallas_kernels.quantised_matmul.formats import GGUF_FORMATS, QuantisedTensor

OUT_TILE = 64
MOST_TOKENS = 64
STAGES = 3


def refusal(x: Array, weight: QuantisedTensor) -> str | None:
    """Why the kernel cannot run these arguments, None where it can."""
    del x
    return refusal_of_weight(weight)


def refusal_of_weight(weight: Array | QuantisedTensor) -> str | None:
    """Why the rows of a weight cannot be addressed, None where they can."""
    if isinstance(weight, QuantisedTensor) and weight.format in GGUF_FORMATS:
        return f"{weight.format} blocks of a GGUF are multiplied natively on CPUs only."
    if math.prod(weight.shape[:-1]) >= 2**31:
        return f"a stack of shape {weight.shape} has 2**31 rows or more; split it."
    return None


def quantised_matmul(
    x: Float[Array, "T in"],
    weight: QuantisedTensor,
    *,
    layer: Int[Array, ""] | None,
    interpret: bool,
) -> Float[Array, "T out"]:
    """See `api.quantised_matmul`."""
    layer = jnp.int32(0) if layer is None else layer
    tokens, n_out = x.shape[0], weight.shape[-2]
    form = gpu_tiles.Weight.of(weight)
    tile = min(MOST_TOKENS, max(16, pl.next_power_of_2(tokens)))
    planes = tiles.split_planes(x, form.planes)
    operands = vary_together(layer[None], planes.reshape(-1, form.words), *gpu_tiles.flatten(weight))
    return pl.pallas_call(
        functools.partial(_kernel, weight=form, tile=tile, tokens=tokens),
        out_shape=result_like((tokens, n_out), x.dtype, *operands),
        grid=(pl.cdiv(tokens, tile), pl.cdiv(n_out, OUT_TILE)),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=STAGES),
        interpret=interpret,
        name=f"quantised_matmul_{weight.format}",
    )(*operands)


def _kernel(layer, x, *refs, weight, tile, tokens):
    *arrays, y = refs
    row = pl.program_id(0) * tile + jnp.arange(tile, dtype=jnp.int32)
    feature = pl.program_id(1) * OUT_TILE + jnp.arange(OUT_TILE, dtype=jnp.int32)
    real = row < tokens
    total = gpu_tiles.product(x, row, real, tuple(arrays), layer[0], feature, weight)
    place = gpu_tiles.grid(row, feature)
    plgpu.store(y.at[place], total.astype(y.dtype), mask=gpu_tiles.both(real, feature < weight.rows))

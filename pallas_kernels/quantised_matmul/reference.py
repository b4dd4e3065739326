"""Weight-only quantised matmul in plain XLA: the reference, and what runs on a CPU.

The weight is dequantised a block of rows at a time, so that the temporaries stay in cache and never reach
the size of the weight.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.common.varying import vary_like
from pallas_kernels.quantised_matmul.formats import ROW_SCALED, QuantisedTensor, dequantise, slice_leading, unpack

BLOCK_ELEMENTS = 1 << 20


def quantised_matmul(
    x: Float[Array, "T in"], weight: QuantisedTensor, *, layer: Int[Array, ""] | None = None
) -> Float[Array, "T out"]:
    """See `api.quantised_matmul`."""
    n_out, n_in = weight.shape[-2:]
    block = max(128, BLOCK_ELEMENTS // n_in // 128 * 128)
    if layer is None:
        weight, layer = jax.tree.map(lambda leaf: leaf[None], weight), jnp.int32(0)
    if block >= n_out:
        return multiply_f32(x, rows_of(weight, layer, 0, n_out)).astype(x.dtype)

    def step(i, y):
        start = jnp.minimum(i * block, n_out - block)
        part = multiply_f32(x, rows_of(weight, layer, start, block))
        return jax.lax.dynamic_update_slice(y, part.astype(x.dtype), (0, start))

    y = vary_like(jnp.zeros((x.shape[0], n_out), x.dtype), x, weight, layer)
    return jax.lax.fori_loop(0, -(-n_out // block), step, y)


def multiply_f32(x: Float[Array, "T in"], weight: QuantisedTensor) -> Float[Array, "T out"]:
    """x @ weight.T in float32, with the elements of the weight rounded to the dtype of x before they multiply.

    A scale that is constant along a row multiplies the sum instead, which rounds less.
    """
    if weight.format in ROW_SCALED:
        return matmul(x, unpack(weight).astype(x.dtype)) * weight.scale.astype(jnp.float32)
    return matmul(x, dequantise(weight, x.dtype))


def matmul(x: Float[Array, "T in"], w: Float[Array, "out in"]) -> Float[Array, "T out"]:
    """x @ w.T, summed and returned in float32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum("ti,oi->to", x, w, precision=precision, preferred_element_type=jnp.float32)


def rows_of(weight: QuantisedTensor, layer: Int[Array, ""], start, size: int) -> QuantisedTensor:
    """Rows [start, start + size) of one layer of a stack `[L, out, in]`, without touching the rest.

    fp8 scales become one per row and column block, since rows need not begin at a block.
    """
    packed, scale = weight.packed, weight.scale
    packed = slice_leading(packed, (layer, start), (1, size))[0]
    if weight.format == "fp8" and scale.shape[1] != weight.shape[1]:
        blocks = (start + jnp.arange(size)) // weight.group
        scale = jax.lax.dynamic_index_in_dim(scale, layer, 0, keepdims=False)[blocks]
    else:
        scale = slice_leading(scale, (layer, start), (1, size))[0]
    return dataclasses.replace(weight, packed=packed, scale=scale)

"""Matrix products with weights stored `[out…, in…]`, and the one place that chooses how a platform does them."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.quantised_matmul import QuantisedTensor, quantised_matmul
from trillion_infer.layers.context import Context
from trillion_infer.layers.parameters import LayerSlice


def linear(
    x: Float[Array, "T *in"], weight: nnx.Param, ctx: Context, in_axes: int = 1, dtype: DTypeLike | None = None
) -> Float[Array, "T *out"]:
    """x · weight over the last `in_axes` axes of both, accumulated in float32, in the activation dtype or `dtype`.

    `weight` is `[*out, *in]` (quantised: `[*out, in]`), bound to a layer of its stack or to an array. Where the `in`
    axes are split over the mesh the result is this shard's part of the sum.
    """
    held = weight.get_value()
    dtype = ctx.ops.dtype if dtype is None else dtype
    stack, index = (held.stack, held.index) if isinstance(held, LayerSlice) else (held, None)
    if isinstance(stack, QuantisedTensor):
        return _quantised(x, stack, index, ctx, dtype)
    if ctx.ops.matmul == "cpu":
        return _native(x, stack, index, in_axes).astype(dtype)
    w = held.read() if isinstance(held, LayerSlice) else held
    return _dot(x, w, in_axes).astype(dtype)


def _dot(x: Array, w: Array, in_axes: int) -> Array:
    if x.dtype == jnp.float32:
        w = w.astype(jnp.float32)
    x_axes = tuple(range(x.ndim - in_axes, x.ndim))
    w_axes = tuple(range(w.ndim - in_axes, w.ndim))
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(x, w, ((x_axes, w_axes), ((), ())), precision, preferred_element_type=jnp.float32)


def _quantised(x: Array, stack: QuantisedTensor, index: Array | None, ctx: Context, dtype: DTypeLike) -> Array:
    """A quantised stack is `[L, *out, in]`, its `in` axes merged; the op reads one layer of it where it lies."""
    lead = 0 if index is None else 1
    out = stack.shape[lead:-1]
    flat = jax.tree.map(
        lambda leaf: leaf.reshape(*leaf.shape[:lead], math.prod(out), *leaf.shape[lead + len(out) :]), stack
    )
    rows = x.reshape(x.shape[0], -1).astype(jnp.promote_types(x.dtype, dtype))
    y = quantised_matmul(
        rows,
        flat,
        layer=index,
        backend=ctx.ops.attention,
        interpret=ctx.ops.interpret,
        int8_activations=ctx.ops.int8_activations,
    )
    return y.reshape(x.shape[0], *out).astype(dtype)


def _native(x: Array, stack: Array, index: Array | None, in_axes: int) -> Array:
    """The native CPU kernel reads layer `index` of the stack where it lies, in its own dtype."""
    from pallas_kernels.cpu_native.matmul import matmul

    if index is None:
        stack, index = stack[None], jnp.int32(0)
    out, ins = stack.shape[1 : stack.ndim - in_axes], stack.shape[stack.ndim - in_axes :]
    flat = stack.reshape(stack.shape[0], math.prod(out), math.prod(ins))
    return matmul(x.reshape(x.shape[0], -1), flat, index).reshape(x.shape[0], *out)

"""Expert matmuls by the native CPU kernels."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul.activations import ACTIVATIONS
from pallas_kernels.quantised_matmul.cpu import refusal_of_weight
from pallas_kernels.quantised_matmul.formats import GGUF_FORMATS, QuantisedTensor
from pallas_kernels.quantised_matmul.native import refusal_of_dtypes, refusal_of_platform

MOST_TILE = 16


def refusal(x: Array, *weights: Array | QuantisedTensor) -> str | None:
    """Why the native kernels cannot run these arguments here; None where they can."""
    reasons = [refusal_of_dtypes(x), *map(refusal_of_weight, weights), *map(_refusal_of_blocks, weights)]
    return next((reason for reason in reasons if reason), None) or refusal_of_platform(x, weights)


def _refusal_of_blocks(weight: Array | QuantisedTensor) -> str | None:
    blocks = isinstance(weight, QuantisedTensor) and weight.format in GGUF_FORMATS
    return "there are no native expert products of GGUF blocks." if blocks else None


def project(
    x: Float[Array, "1 N M"],
    weight: Array | QuantisedTensor,
    bias: Array | None,
    group_sizes: Int[Array, " E"],
    tile: int,
    layer: Int[Array, ""] | None,
    activation: str | None,
    columns: None = None,
    *,
    interpret: bool,
    int8_activations: bool = False,
) -> Float[Array, "N F"]:
    """Rows times the weight of their group; with an activation, gate and up halves `[L, E, 2, F, M]` combined."""
    from pallas_kernels.cpu_native import matmul as native

    del tile, columns, interpret
    if layer is None:
        weight, bias = jax.tree.map(lambda leaf: leaf[None], (weight, bias))
        layer = jnp.int32(0)
    if activation is not None:
        weight, bias = jax.tree.map(_merge_halves, (weight, bias))
    args, wide = (group_sizes, layer), jnp.dtype(jnp.float32)
    if isinstance(weight, QuantisedTensor):
        y = native.quantised_grouped_matmul(
            x[0], weight.packed, weight.scale, *args, out_dtype=wide, int8_activations=int8_activations
        )
    else:
        y = native.grouped_matmul(x[0], weight, *args, out_dtype=wide)
    if bias is not None:
        ends = jnp.cumsum(group_sizes)
        group = jnp.searchsorted(ends, jnp.arange(y.shape[0]), side="right")
        y = y + bias[layer, jnp.minimum(group, ends.shape[0] - 1)].astype(jnp.float32)
    if activation is not None:
        y = ACTIVATIONS[activation](*jnp.split(y, 2, axis=1))
    return y.astype(x.dtype)


def _merge_halves(leaf: Array) -> Array:
    """Gate and up matrices of an expert as one: `[L, E, 2, F, …]` to `[L, E, 2F, …]`."""
    return leaf.reshape(*leaf.shape[:2], -1, *leaf.shape[4:])

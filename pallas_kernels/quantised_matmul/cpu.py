"""Weight-only quantised matmul by the native CPU kernels."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.quantised_matmul.formats import GGUF_FORMATS, QuantisedTensor
from pallas_kernels.quantised_matmul.native import refusal_of_dtypes, refusal_of_platform


def refusal(x: Array, weight: QuantisedTensor) -> str | None:
    """Why the native kernels cannot run these arguments here; None where they can."""
    return refusal_of_weight(weight) or refusal_of_dtypes(x) or refusal_of_platform(x, weight)


def refusal_of_weight(weight: Array | QuantisedTensor) -> str | None:
    """Why a weight cannot be multiplied natively; None where it can."""
    if not isinstance(weight, QuantisedTensor):
        return refusal_of_dtypes(weight)
    if weight.format in ("int4", "int4_affine") and weight.group not in (32, 64, 128):
        return f"native int4 products take groups of 32, 64 or 128, got {weight.group}."
    if weight.format in (*GGUF_FORMATS, "int4_affine"):
        return None
    if weight.format not in ("int8", "int4", "fp8_row"):
        return f"there are no native products of {weight.format} weights."
    return refusal_of_dtypes(weight.scale)


def quantised_matmul(
    x: Float[Array, "T in"], weight: QuantisedTensor, *, layer: Int[Array, ""] | None, int8_activations: bool = False
) -> Float[Array, "T out"]:
    """See `api.quantised_matmul`. With `int8_activations` products are W4A8 or W8A8: see `cpu_native.gguf_matmul`."""
    from pallas_kernels.cpu_native import matmul as native

    layer = jnp.int32(0) if layer is None else layer
    if weight.format in GGUF_FORMATS:
        format = weight.format.upper()
        return native.gguf_matmul(x, weight.packed, layer, format=format, int8_activations=int8_activations)
    return native.quantised_matmul(x, weight.packed, weight.scale, layer, int8_activations=int8_activations)

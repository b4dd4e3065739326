"""Root-mean-square normalisation (arXiv 1910.07467)."""

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from trillion_infer.layers.parameters import WHOLE, single, stacked, value


def rms_normalise(x: Float[Array, "*b D"], eps: float) -> Float[Array, "*b D"]:
    """x over the root of its mean square, in float32. On CPU a row's bits do not depend on how many rows there are."""
    x = x.astype(jnp.float32)
    total = lax.platform_dependent(x * x, cpu=_sum_by_halves, default=lambda s: jnp.sum(s, axis=-1, keepdims=True))
    return x * lax.rsqrt(total / x.shape[-1] + eps)


def _sum_by_halves(x: Float[Array, "*b D"]) -> Float[Array, "*b 1"]:
    """The sum of each row in an order that is written down: XLA for CPUs reduces one row in another than several."""
    while x.shape[-1] > 1 and x.shape[-1] % 2 == 0:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    total = x[..., :1]
    for place in range(1, x.shape[-1]):
        total = total + x[..., place : place + 1]
    return total


class RMSNorm(nnx.Module):
    """x / rms(x) * weight, or * (1 + weight) with `plus_one`; float32 inside, the dtype of x outside.

    A str for prefixes is a norm outside the layers.
    """

    def __init__(self, prefixes: tuple[str, ...] | str, width: int, eps: float, plus_one: bool = False):
        self.width, self.eps, self.plus_one = width, eps, plus_one
        if isinstance(prefixes, str):
            self.weight = single((width,), ("norm",), f"{prefixes}weight", dtype="float32", init="ones")
        else:
            self.weight = stacked(prefixes, (width,), ("norm",), {"weight": WHOLE}, dtype="float32", init="ones")

    def __call__(self, x: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
        weight = value(self.weight).astype(jnp.float32)
        return (rms_normalise(x, self.eps) * (1.0 + weight if self.plus_one else weight)).astype(x.dtype)

"""Root-mean-square normalisation (arXiv 1910.07467)."""

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from trillion_infer.layers.parameters import hold, value
from trillion_infer.params.tree import Declared


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
    """x / rms(x) * weight, or * (1 + weight) with `plus_one`; float32 inside, the dtype of x outside."""

    weight: nnx.Param

    def __init__(self, declared: Declared, eps: float, plus_one: bool = False):
        self.eps, self.plus_one = eps, plus_one
        hold(self, declared)

    @classmethod
    def optional(cls, declared: Declared | None, eps: float, plus_one: bool = False) -> "RMSNorm | None":
        """None where none is declared."""
        return None if declared is None else cls(declared, eps, plus_one)

    def __call__(self, x: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
        weight = value(self.weight).astype(jnp.float32)
        return (rms_normalise(x, self.eps) * (1.0 + weight if self.plus_one else weight)).astype(x.dtype)

"""Gated feed-forward blocks."""

import jax
from flax import nnx
from jaxtyping import Array, Float

from trillion_infer.config.model import DenseSpec
from trillion_infer.layers.context import Context
from trillion_infer.layers.linear import linear
from trillion_infer.layers.parameters import hold
from trillion_infer.params.tree import Declared

ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True)}


class GatedFFN(nnx.Module):
    """down(act(gate x) * up x), with the parameters of `ffn_params`."""

    gate_up: nnx.Param
    down: nnx.Param

    def __init__(self, spec: DenseSpec, declared: Declared):
        self.activation = spec.activation
        hold(self, declared)

    def __call__(self, x: Float[Array, "T M"], ctx: Context) -> Float[Array, "T M"]:
        gate_up = linear(x, self.gate_up, ctx)
        hidden = ACTIVATIONS[self.activation](gate_up[:, 0]) * gate_up[:, 1]
        return ctx.sum_over(linear(hidden, self.down, ctx), "ffn")

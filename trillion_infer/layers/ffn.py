"""Gated feed-forward blocks."""

import jax
from flax import nnx
from jaxtyping import Array, Float

from sharding.heads import round_up
from trillion_infer.config.model import DenseSpec, ModelConfig
from trillion_infer.layers.context import Context
from trillion_infer.layers.linear import linear
from trillion_infer.layers.parameters import Part, stacked

ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True)}


class GatedFFN(nnx.Module):
    """down(act(gate x) * up x). gate_up: `[2, F, M]`, down: `[M, F]`; F is padded to a multiple of the shards."""

    def __init__(self, spec: DenseSpec, config: ModelConfig, prefixes: tuple[str, ...], tensor: int):
        self.activation = spec.activation
        real = slice(0, spec.width)
        width, ffn = config.width, round_up(spec.width, tensor)
        self.gate_up = stacked(
            prefixes,
            (2, ffn, width),
            ("gate_up", "ffn", "embed"),
            {"gate_proj.weight": Part((0, real)), "up_proj.weight": Part((1, real))},
            in_axes=1,
        )
        down = {"down_proj.weight": Part((slice(None), real))}
        self.down = stacked(prefixes, (width, ffn), ("embed", "ffn"), down, in_axes=1)

    def __call__(self, x: Float[Array, "T M"], ctx: Context) -> Float[Array, "T M"]:
        gate_up = linear(x, self.gate_up, ctx)
        hidden = ACTIVATIONS[self.activation](gate_up[:, 0]) * gate_up[:, 1]
        return ctx.sum_over(linear(hidden, self.down, ctx), "ffn")

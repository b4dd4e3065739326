"""Multi-token prediction (DeepSeek V3, arXiv 2412.19437, section 2.2): one more layer of the target's own kind."""

from collections.abc import Mapping

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from trillion_infer.config.model import LayerSpec, ModelConfig
from trillion_infer.layers.context import Ops
from trillion_infer.layers.decoder import Decoder, Layer
from trillion_infer.layers.draft.base import DraftInputs, DraftModel, Params, Pools, first_best
from trillion_infer.layers.linear import linear
from trillion_infer.layers.norm import RMSNorm
from trillion_infer.layers.parameters import bind, hold
from trillion_infer.params.blocks import norm_params
from trillion_infer.params.decoder import layer_params
from trillion_infer.params.names import TensorNames
from trillion_infer.params.tree import WHOLE, stacked


class MTPLayer(nnx.Module):
    """join: `[M, 2M]` over the normed embedding and the normed states."""

    join: nnx.Param

    def __init__(self, spec: LayerSpec, config: ModelConfig, number: int, names: TensorNames, sizes: Mapping[str, int]):
        prefix, width = names.layer.format(number), config.width

        def norm(name: str) -> RMSNorm:
            return RMSNorm(norm_params((prefix + name,), width), config.norm_eps)

        self.token_norm, self.state_norm = norm("enorm."), norm("hnorm.")
        hold(self, {"join": stacked((prefix,), (width, 2 * width), ("embed", "latent"), {"eh_proj.weight": WHOLE})})
        self.layer = Layer(spec, config, layer_params(spec, config, (number,), names, sizes), sizes)
        self.norm = norm("shared_head.norm.")


class MTP(DraftModel):
    """The first MTP layer of the target's checkpoint, applied again for each further token of a chain.

    Embedding and head are the target's. A chain feeds back the states after the layer's own norm, as the target's
    come after its last norm.
    """

    def __init__(self, target: Decoder, sizes: Mapping[str, int], ops: Ops, config: ModelConfig):
        super().__init__(sizes, ops)
        self.config = config
        self._target = target
        number = len(target.config.layers)
        self.module = MTPLayer(config.layers[0], config, number, target.names, sizes)
        self._head = target.embed if target.head is None else target.head
        tied = "embed.table" if target.head is None else "head.table"
        self.borrowed = {"embed.table": "embed.table", "head.table": tied}

    def begin(self, params: Params, hidden: Float[Array, "T M"], aux) -> Float[Array, "T M"]:
        return hidden

    def run(self, params: Params, pools: Pools, inputs: DraftInputs) -> tuple[Float[Array, "T M"], Pools]:
        ctx, bound = self.context(inputs), bind(self.module, params, "", jnp.int32(0))
        embedded = bind(self._target.embed, params, "embed.")(inputs.tokens, ctx)
        joined = jnp.concatenate([bound.token_norm(embedded), bound.state_norm(inputs.states)], axis=1)
        x, pools = bound.layer(linear(joined, bound.join, ctx), pools, jnp.int32(0), ctx, jnp.int32(0))
        return bound.norm(x), pools

    def best(self, params: Params, states: Float[Array, "S M"]) -> tuple[Int[Array, "S"], Float[Array, "S"]]:
        return first_best(self.logits(params, states), self.bare_context())

    def logits(self, params: Params, states: Float[Array, "S M"]) -> Float[Array, "S V_shard"]:
        head = bind(self._head, params, "head.")
        return head.logits(states, self.bare_context(), self._target.config.logit_cap)

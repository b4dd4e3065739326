"""A smaller model of the same vocabulary as a drafter."""

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from trillion_infer.layers.context import Ops
from trillion_infer.layers.decoder import Decoder, StepInputs
from trillion_infer.layers.draft.base import DraftInputs, DraftModel, Params, Pools, first_best


class SmallDecoder(DraftModel):
    """Any decoder, with KV of its own at the same positions as the target's."""

    shifted = False
    borrowed: Mapping[str, str] = {}

    def __init__(self, decoder: Decoder, sizes: Mapping[str, int], ops: Ops):
        super().__init__(sizes, ops)
        self.module, self.config = decoder, decoder.config

    def begin(self, params: Params, hidden, aux) -> None:
        return None

    def run(self, params: Params, pools: Pools, inputs: DraftInputs) -> tuple[Float[Array, "T M"], Pools]:
        rows = jnp.zeros(0, jnp.int32)
        step = StepInputs(inputs.tokens, inputs.rope_lens, rows, inputs.sequences, max_q_len=inputs.max_q_len)
        states, _, pools = self.module.states(params, pools, step, self.sizes, self.ops)
        return states, pools

    def best(self, params: Params, states: Float[Array, "S M"]) -> tuple[Int[Array, "S"], Float[Array, "S"]]:
        return first_best(self.module.logits(params, states, self.sizes, self.ops), self.bare_context())

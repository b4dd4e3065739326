"""What drafting programs ask of a model that drafts. Everything runs on one shard of the mesh."""

import abc
import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from trillion_infer.config.model import ModelConfig
from trillion_infer.layers.context import Context, Ops, Sequences
from trillion_infer.layers.pools import Pools
from trillion_infer.layers.rope import rope_tables

Params = Mapping[str, Any]


@dataclass(frozen=True)
class DraftInputs:
    """Tokens at the positions of `sequences`; states: what `begin` or the run before gave, None where none are read.

    max_q_len: promise that no sequence has more query tokens.
    """

    tokens: Int[Array, "T"]
    states: Float[Array, "T M"] | None
    rope_lens: Int[Array, "T"]
    sequences: Sequences
    max_q_len: int | None = None


class DraftModel(abc.ABC):
    """config: the layers that it runs, with KV of their own. module: the nnx.Module of its parameters.

    borrowed: parameters of the target that it reads, by the name under which it does.
    shifted: at position i it takes token i + 1 and the target's states of token i; otherwise token i alone.
    aux_layers: after how many target layers the states are taken that `begin` gets.
    """

    config: ModelConfig
    module: Any
    borrowed: Mapping[str, str]
    shifted = True
    aux_layers: tuple[int, ...] = ()

    def __init__(self, sizes: Mapping[str, int], ops: Ops):
        self.sizes, self.ops = sizes, ops

    def with_ops(self, ops: Ops) -> Self:
        """The same model run by other ops."""
        other = copy.copy(self)
        other.ops = ops
        return other

    @abc.abstractmethod
    def begin(
        self, params: Params, hidden: Float[Array, "T M"], aux: tuple[Float[Array, "T M"], ...]
    ) -> Float[Array, "T M"] | None:
        """States of tokens that the target has computed: from its final hidden states and the auxiliary ones."""

    @abc.abstractmethod
    def run(self, params: Params, pools: Pools, inputs: DraftInputs) -> tuple[Float[Array, "T M"], Pools]:
        """Writes KV at the positions given; states after the layers, which the next position of a chain takes."""

    @abc.abstractmethod
    def best(self, params: Params, states: Float[Array, "S M"]) -> tuple[Int[Array, "S"], Float[Array, "S"]]:
        """The likeliest next token, as an id of the target, and its probability."""

    def context(self, inputs: DraftInputs) -> Context:
        """Rotary tables and pools for the layers of `config`."""
        ropes = {layer.mixer.rope for layer in self.config.layers if layer.mixer.rope is not None}
        positions = inputs.sequences.positions
        return Context(
            sequences=inputs.sequences,
            ropes={rope: rope_tables(rope, positions, inputs.rope_lens) for rope in ropes},
            cache_index={key: i for i, key in enumerate(self.config.cache_keys)},
            axis_sizes=self.sizes,
            ops=self.ops,
            max_q_len=inputs.max_q_len,
        )

    def bare_context(self) -> Context:
        """For what no position matters to: norms, products, embeddings."""
        return Context(None, {}, {}, self.sizes, self.ops)  # pyright: ignore[reportArgumentType]


def first_best(logits: Float[Array, "S V_shard"], ctx: Context) -> tuple[Int[Array, "S"], Float[Array, "S"]]:
    """Index of the largest logit over all shards, the first of equals, and its probability."""
    axes = ctx.axes("vocab")
    local = logits.max(axis=1)
    top = lax.pmax(local, axes) if axes else local
    place = jnp.argmax(logits, axis=1).astype(jnp.int32) + ctx.shard_index("vocab") * logits.shape[1]
    place = jnp.where(local == top, place, jnp.iinfo(jnp.int32).max)
    place = lax.pmin(place, axes) if axes else place
    total = ctx.sum_over(jnp.exp(logits - top[:, None]).sum(axis=1), "vocab")
    return place, 1.0 / total

"""What the sampler remembers about each running request, on the device."""

import dataclasses
from collections.abc import Callable
from typing import Any, Self, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from trillion_infer.sample.rows import RowParams

SLOT_CHUNK = 512
"""Entries of a request's history that one call of `init_slot` takes."""

PADDING, PROMPT, OUTPUT, BIAS = 0, 1, 2, 3
"""Kinds of entry in a chunk of `init_slot`."""


Tables = tuple[Int[Array, "R V"], Bool[Array, "R V"], Float[Array, "R V"]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplerState:
    """N slots, one for each request that may run; donated to the step and updated in place by scatters.

    last_token: the newest token, which the next decode step reads; counts: how often the output holds each
    token; prompt_mask: tokens of the prompt; bias: added to the logits (-inf forbids a token).
    Without penalties the last three have no rows.
    """

    last_token: Int[Array, "N"]
    counts: Int[Array, "N V"]
    prompt_mask: Bool[Array, "N V"]
    bias: Float[Array, "N V"]

    @classmethod
    def shapes(cls, num_slots: int, vocab: int, *, penalties: bool = True) -> Self:
        """The state's shapes; `vocab` is the padded vocabulary. penalties=False saves 9 bytes per slot and token and
        makes penalties, logit_bias and bad_words unavailable (`host.check_supported` refuses them)."""
        table = (num_slots if penalties else 0, vocab)
        shape = cast("Callable[..., Any]", jax.ShapeDtypeStruct)
        return cls(
            last_token=shape((num_slots,), jnp.int32),
            counts=shape(table, jnp.int32),
            prompt_mask=shape(table, jnp.bool_),
            bias=shape(table, jnp.float32),
        )

    @classmethod
    def create(cls, num_slots: int, vocab: int, *, penalties: bool = True) -> Self:
        """Empty state, of `shapes`."""
        shapes = cls.shapes(num_slots, vocab, penalties=penalties)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    @classmethod
    def specs(cls, vocab_axis: str | tuple[str, ...] | None) -> Self:
        """How to shard each field when the logits' vocabulary lies over the mesh axes `vocab_axis`."""
        table = PartitionSpec(None, vocab_axis)
        return cls(last_token=PartitionSpec(), counts=table, prompt_mask=table, bias=table)  # pyright: ignore

    @property
    def has_tables(self) -> bool:
        """Penalties and biases can be served."""
        return self.counts.shape[0] > 0


def init_slot(state: SamplerState, header: Int[Array, "3"], chunk: Int[Array, "3 C"]) -> SamplerState:
    """Enter one chunk of a request's history into its slot; `host.slot_chunks` makes the arguments.

    header: (slot, 1 to clear the slot first, last token). chunk: ids, kinds (PADDING, PROMPT, OUTPUT, BIAS) and,
    for BIAS, the bits of the float32 value. A preempted request enters again from its tokens with equal result.
    """
    slot, clear, last = header[0], header[1] != 0, header[2]
    last_token = state.last_token.at[slot].set(last)
    if not state.has_tables:
        return dataclasses.replace(state, last_token=last_token)
    ids, kinds = chunk[0], chunk[1]
    vocab = state.counts.shape[1]

    def ids_of(kind: int) -> Int[Array, "C"]:
        return jnp.where(kinds == kind, ids, vocab)

    def kept(table: Array) -> Array:
        return table.at[slot].set(jnp.where(clear, jnp.zeros((), table.dtype), table[slot]))

    values = jax.lax.bitcast_convert_type(chunk[2], jnp.float32)
    return SamplerState(
        last_token=last_token,
        counts=kept(state.counts).at[slot, ids_of(OUTPUT)].add(1, mode="drop"),
        prompt_mask=kept(state.prompt_mask).at[slot, ids_of(PROMPT)].set(True, mode="drop"),
        bias=kept(state.bias).at[slot, ids_of(BIAS)].set(values, mode="drop"),
    )


def record(
    state: SamplerState, slots: Int[Array, "R"], tokens: Int[Array, "R"], active: Bool[Array, "R"]
) -> SamplerState:
    """State after each active row's slot produced its token; other rows change nothing."""
    return record_many(state, slots, tokens[:, None], active.astype(jnp.int32))


def record_many(
    state: SamplerState, slots: Int[Array, "R"], tokens: Int[Array, "R n"], count: Int[Array, "R"]
) -> SamplerState:
    """State after each slot produced the first `count` of its tokens; rows with none change nothing."""
    nowhere = state.last_token.shape[0]
    newest = jnp.take_along_axis(tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    last_token = state.last_token.at[jnp.where(count > 0, slots, nowhere)].set(newest, mode="drop")
    counts = state.counts
    if state.has_tables:
        produced = jnp.arange(tokens.shape[1])[None, :] < count[:, None]
        counts = counts.at[jnp.where(produced, slots[:, None], nowhere), tokens].add(1, mode="drop")
    return dataclasses.replace(state, last_token=last_token, counts=counts)


def slot_tables(state: SamplerState, rows: RowParams) -> Tables:
    """Counts, prompt mask and bias of each row's slot; the bias is 0 where the row says it does not count."""
    bias = jnp.where(rows.has_bias[:, None], state.bias[rows.slot], 0.0)
    return state.counts[rows.slot], state.prompt_mask[rows.slot], bias

"""Blocks of queries that a kernel works through one after another."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int


class Items(NamedTuple):
    """Blocks of at most `size` consecutive queries of one sequence each; only the first `count` are real."""

    sequence: Int[Array, "I"]
    first_token: Int[Array, "I"]
    first_position: Int[Array, "I"]
    last_position: Int[Array, "I"]
    count: Int[Array, ""]


def decode_items(kv_lens: Int[Array, "S"], num_seqs: Int[Array, "2"], tokens: int) -> Items:
    """A block for each sequence with one query token: sequence i, token i."""
    index = jnp.arange(min(tokens, kv_lens.shape[0]), dtype=jnp.int32)
    position = jnp.maximum(kv_lens[: index.shape[0]] - 1, 0)
    return Items(index, index, position, position, num_seqs[0])


def prefill_items(
    kv_lens: Int[Array, "S"], cu_q_lens: Int[Array, "S+1"], num_seqs: Int[Array, "2"], tokens: int, size: int
) -> tuple[Items, Int[Array, "T"]]:
    """The blocks of all other sequences, and for each token its row among the rows of all blocks.

    Of `tokens` in k sequences, the first of each begins a block, and of the others at most each size-th.
    """
    sequences = kv_lens.shape[0]
    most = min(sequences, tokens)
    number = jnp.arange(sequences, dtype=jnp.int32)
    todo = (number >= num_seqs[0]) & (number < num_seqs[1])
    lens = jnp.where(todo, jnp.diff(cu_q_lens), 0)
    blocks = (lens + size - 1) // size
    ends = jnp.cumsum(blocks)
    index = jnp.arange(most + (tokens - most) // size, dtype=jnp.int32)
    s = jnp.minimum(jnp.searchsorted(ends, index, side="right"), sequences - 1).astype(jnp.int32)
    offset = jnp.where(index < ends[-1], (index - (ends - blocks)[s]) * size, 0)
    first = jnp.maximum(kv_lens[s] - lens[s] + offset, 0)
    last = jnp.maximum(jnp.minimum(first + size, kv_lens[s]) - 1, 0)
    items = Items(s, cu_q_lens[s] + offset, first, last, ends[-1])
    token = jnp.arange(tokens, dtype=jnp.int32)
    owner = jnp.clip(jnp.searchsorted(cu_q_lens, token, side="right") - 1, 0, sequences - 1)
    within = token - cu_q_lens[owner]
    row = ((ends - blocks)[owner] + within // size) * size + within % size
    return items, jnp.clip(row, 0, index.shape[0] * size - 1)

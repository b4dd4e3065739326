"""Where the new tokens of a ragged batch go in a paged pool."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.common.slot_shard import SlotShard


def token_places(
    tokens: int,
    page_size: int,
    kv_lens: Int[Array, " S"],
    page_table: Int[Array, "S B"],
    cu_q_lens: Int[Array, " S+1"],
    num_seqs: Int[Array, " 2"],
    slots: SlotShard,
) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
    """Page and slot of each query token; page -1 for padding and for what another shard holds.

    Args:
      page_size: slots that the shard has of a page.
    """
    token = jnp.arange(tokens, dtype=jnp.int32)
    sequence = jnp.clip(jnp.searchsorted(cu_q_lens, token, side="right") - 1, 0, kv_lens.shape[0] - 1)
    position = kv_lens[sequence] - cu_q_lens[sequence + 1] + token
    page = slots.page(page_size)
    slot = position % page - slots.index * page_size
    mine = (token < cu_q_lens[num_seqs[1]]) & (slot >= 0) & (slot < page_size)
    return jnp.where(mine, page_table[sequence, jnp.where(mine, position // page, 0)], -1), slot

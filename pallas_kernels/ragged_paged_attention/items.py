"""Work items: a ragged batch cut into blocks of queries of one sequence each."""

import jax.numpy as jnp
from jaxtyping import Array, Int


def work_items(
    cu_q_lens: Int[Array, " S+1"], first: Int[Array, ""], last: Int[Array, ""], block_q: int, tokens: int
) -> tuple[Int[Array, " N"], Int[Array, " N"], Int[Array, ""]]:
    """Blocks of at most `block_q` queries of the sequences in [first, last), in order.

    Args:
      tokens: most query tokens that the sequences can have together; bounds N.

    Returns:
      Sequence of each item, tokens of that sequence before it, and the number of items; the rest is padding.
    """
    sequences = cu_q_lens.shape[0] - 1
    index = jnp.arange(sequences, dtype=jnp.int32)
    lens = jnp.where((index >= first) & (index < last), jnp.diff(cu_q_lens), 0)
    counts = (lens + block_q - 1) // block_q
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    bound = sequences if block_q == 1 else -(-tokens // block_q) + sequences
    item = jnp.arange(bound, dtype=jnp.int32)
    sequence = jnp.minimum(jnp.searchsorted(ends, item, side="right").astype(jnp.int32), sequences - 1)
    offset = (item - (ends - counts)[sequence]) * block_q
    return sequence, jnp.where(item < ends[-1], offset, 0), ends[-1]

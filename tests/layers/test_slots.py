"""Slices of a ragged batch are the batch, a part at a time."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trillion_infer.layers.slots import token_slice

SEQUENCES = 6


@settings(max_examples=60)
@given(
    decode=st.integers(0, 3),
    prefill=st.lists(st.integers(2, 20), max_size=3),
    cached=st.lists(st.integers(0, 30), min_size=SEQUENCES, max_size=SEQUENCES),
    size=st.sampled_from([4, 8, 16]),
)
def test_slices_place_every_token_where_the_whole_batch_does(decode, prefill, cached, size):
    """Page table row and position of each token; sequences of one token lead; padding stays padding."""
    lens = np.array([1] * decode + prefill, np.int32)
    total = int(lens.sum())
    cu = np.full(SEQUENCES + 1, total, np.int32)
    cu[: len(lens) + 1] = np.concatenate([[0], np.cumsum(lens)])
    kv_lens = np.zeros(SEQUENCES, np.int32)
    kv_lens[: len(lens)] = lens + cached[: len(lens)]
    table = np.arange(SEQUENCES, dtype=np.int32)[:, None] * 100
    batch = tuple(map(jnp.asarray, (kv_lens, table, cu, np.array([decode, len(lens)], np.int32))))
    found = []
    for start in range(0, total + size, size):
        part_lens, part_table, part_cu, (ones, real) = map(np.asarray, token_slice(batch, jnp.int32(start), size))
        counts = np.diff(part_cu)
        assert part_cu[0] == 0
        assert (counts[:ones] == 1).all()
        assert (counts[:real] > 0).all()
        assert not counts[real:].any()
        assert not part_lens[real:].any()
        for s in range(real):
            found += [(int(part_table[s, 0]), int(part_lens[s] - counts[s] + i)) for i in range(counts[s])]
    expected = [(s * 100, cached[s] + i) for s, n in enumerate(lens) for i in range(n)]
    assert found == expected

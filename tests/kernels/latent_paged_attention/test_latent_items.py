"""Blocks of queries hold every token once, however tokens fall into sequences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.latent_paged_attention.items import prefill_items

SEQUENCES, TOKENS, SIZE = 6, 17, 4
blocks_of = jax.jit(functools.partial(prefill_items, tokens=TOKENS, size=SIZE))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=SEQUENCES), st.integers(0, 3))
def test_each_token_has_a_row_of_its_own_in_a_block_of_its_sequence(lens, cached):
    lens = [n for n, end in zip(lens, np.cumsum(lens), strict=True) if end <= TOKENS]
    lens += [0] * (SEQUENCES - len(lens))
    starts = np.cumsum([0, *lens])
    kv_lens = jnp.array([n + cached for n in lens], jnp.int32)
    items, rows = blocks_of(kv_lens, jnp.asarray(starts, jnp.int32), jnp.array([0, SEQUENCES], jnp.int32))
    assert items.count == sum(-(-n // SIZE) for n in lens) <= items.sequence.shape[0]
    found = np.asarray(rows)[: starts[-1]]
    assert len(set(found.tolist())) == starts[-1]
    sequence = np.repeat(np.arange(SEQUENCES), lens)
    np.testing.assert_array_equal(np.asarray(items.sequence)[found // SIZE], sequence)
    np.testing.assert_array_equal(np.asarray(items.first_token)[found // SIZE] + found % SIZE, np.arange(starts[-1]))

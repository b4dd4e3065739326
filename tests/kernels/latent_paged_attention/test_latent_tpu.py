"""The TPU kernel of latent attention in interpret mode, every slot that must not be read poisoned."""

import functools

import jax
import latent_cases
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from latent_cases import Case

from pallas_kernels.common.backends import UnsupportedError
from pallas_kernels.latent_paged_attention import latent_paged_attention

SHAPE = {"rank": 128, "rope": 32, "width": 256, "heads": 4}
MIXED = ((0, 1), (16, 1), (700, 1), (0, 40), (17, 5), (100, 130), (20, 0), (3, 2))
CASES = {
    "decode": Case(((0, 1), (15, 1), (16, 1), (1500, 1)), **SHAPE),
    "mixed": Case(MIXED, **SHAPE),
    "prefill": Case(((0, 200),), padded_tokens=0, padded_seqs=0, **SHAPE),
    "large_pages": Case(MIXED, page_size=256, **SHAPE),
    "bfloat16": Case(MIXED, dtype="bfloat16", **SHAPE),
    "a_rank_of_part_of_the_lanes": Case(MIXED[:4], rank=40, rope=16, width=128),
    "nothing": Case((), padded_tokens=8, padded_seqs=4, **SHAPE),
}
interpreted = jax.jit(
    functools.partial(latent_paged_attention, backend="tpu", interpret=pltpu.InterpretParams(detect_races=True)),
    static_argnames="scale",
)


@pytest.mark.parametrize("name", CASES)
def test_it_equals_dense_attention(name):
    latent_cases.check(CASES[name], interpreted)


@settings(max_examples=3, deadline=None)
@given(
    st.lists(st.integers(0, 70), max_size=3),
    st.lists(st.tuples(st.integers(0, 70), st.integers(0, 40)), max_size=3),
    st.integers(0, 9),
)
def test_any_ragged_batch_equals_dense_attention(decodes, rest, seed):
    lens = (*((cached, 1) for cached in decodes), *rest)
    padded = 128 - sum(extend for _, extend in lens)
    case = Case(lens, padded_tokens=padded, padded_seqs=7 - len(lens), blocks=16, seed=seed, **SHAPE)
    latent_cases.check(case, interpreted)


def test_a_pool_that_is_not_padded_is_refused_with_the_reason():
    batch = latent_cases.build(Case(((0, 1),), rank=128, rope=64, width=192))
    with pytest.raises(UnsupportedError, match=r"tpu: the pool's last axis \(192\) must be a multiple of 128"):
        latent_paged_attention(*(np.asarray(a) for a in batch.args), scale=1.0, backend="tpu")

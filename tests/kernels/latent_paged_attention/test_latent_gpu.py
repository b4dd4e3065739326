"""The Triton kernel of latent attention in interpret mode, every slot that must not be read poisoned."""

import functools

import jax
import latent_cases
import numpy as np
import pytest
from latent_cases import Case

from pallas_kernels.common.backends import UnsupportedError
from pallas_kernels.latent_paged_attention import latent_paged_attention

MIXED = ((0, 1), (16, 1), (100, 1), (0, 20), (17, 5), (30, 40), (20, 0), (3, 2))
CASES = {
    "decode": Case(((0, 1), (15, 1), (16, 1), (200, 1))),
    "mixed": Case(MIXED),
    "heads_that_are_no_power_of_two": Case(MIXED[1:5], heads=20),
    "prefill": Case(((0, 70),), padded_tokens=0, padded_seqs=0),
    "bfloat16": Case(MIXED, dtype="bfloat16"),
    "nothing": Case((), padded_tokens=8, padded_seqs=4),
}
interpreted = jax.jit(functools.partial(latent_paged_attention, backend="gpu", interpret=True), static_argnames="scale")


@pytest.mark.parametrize("name", CASES)
def test_it_equals_dense_attention(name):
    latent_cases.check(CASES[name], interpreted)


def test_a_rank_that_is_no_power_of_two_is_refused_with_the_reason():
    batch = latent_cases.build(Case(((0, 1),), rank=48, rope=16, width=64))
    with pytest.raises(UnsupportedError, match="gpu: the latent rank must be a power of two from 16 on, got 48"):
        latent_paged_attention(*(np.asarray(a) for a in batch.args), scale=1.0, backend="gpu")

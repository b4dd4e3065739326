"""The Triton kernel of latent attention in interpret mode, every slot that must not be read poisoned."""

import functools

import jax
import latent_cases
import pytest
from latent_cases import Case

from pallas_kernels.latent_paged_attention import latent_paged_attention

MIXED = ((0, 1), (16, 1), (100, 1), (0, 20), (17, 5), (30, 40), (20, 0), (3, 2))
CASES = {
    "decode": Case(((0, 1), (15, 1), (16, 1), (200, 1))),
    "mixed": Case(MIXED),
    "heads_that_are_no_power_of_two": Case(MIXED[1:5], heads=20),
    "prefill": Case(((0, 70),), padded_tokens=0, padded_seqs=0),
    "bfloat16": Case(MIXED, dtype="bfloat16"),
    "sizes_that_are_no_powers_of_two": Case(MIXED[:4], rank=40, rope=8, width=48),
    "nothing": Case((), padded_tokens=8, padded_seqs=4),
}
interpreted = jax.jit(functools.partial(latent_paged_attention, backend="gpu", interpret=True), static_argnames="scale")


@pytest.mark.parametrize("name", CASES)
def test_it_equals_dense_attention(name):
    latent_cases.check(CASES[name], interpreted)

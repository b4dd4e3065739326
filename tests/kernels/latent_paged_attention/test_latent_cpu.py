"""The native backend of latent attention, every slot that must not be read poisoned."""

import functools

import jax
import latent_cases
import pytest
from latent_cases import Case

from pallas_kernels.cpu_native import native
from pallas_kernels.latent_paged_attention import latent_paged_attention

pytestmark = pytest.mark.skipif(not native().isas, reason=native().reason or "native kernels are here")
MIXED = ((0, 1), (16, 1), (100, 1), (0, 20), (17, 5), (30, 40), (20, 0), (3, 2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_equals_dense_attention(dtype):
    run = jax.jit(functools.partial(latent_paged_attention, backend="cpu"), static_argnames="scale")
    latent_cases.check(Case(MIXED, width=64, dtype=dtype), run)

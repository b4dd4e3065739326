"""Every shape of a real model, interpreted, against dense attention in float64; slots that no query sees hold NaN."""

import functools

import jax
import latent_cases
import pytest
from latent_cases import Case

from pallas_kernels.latent_paged_attention import latent_paged_attention
from pallas_kernels.latent_paged_attention.arg_specs import SPECS
from tests.kernels.interpreters import INTERPRET

PLAIN = [spec for spec in SPECS if spec.shards == 1 and spec.pool_dtype == "bfloat16"]
"""Pools of 8 bits and shards of pools have tests of their own."""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tpu", "gpu"])
@pytest.mark.parametrize("spec", PLAIN, ids=lambda spec: spec.name)
def test_the_kernel_matches_dense_attention(spec, backend):
    case = Case(
        ((2, 1), (spec.page_size + 3, 1), (7, 4)),
        heads=spec.heads,
        rank=spec.rank,
        rope=spec.rope,
        width=spec.pool(backend, 1).shape[3],
        page_size=spec.page_size,
        layers=1,
        layer=0,
        dtype="bfloat16",
    )
    op = functools.partial(latent_paged_attention, backend=backend, interpret=INTERPRET[backend])
    latent_cases.check(case, jax.jit(op, static_argnames="scale"))

"""Every shape of a real model, interpreted, against dense attention in float64; slots that no query sees hold NaN."""

import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention import pool_shape
from pallas_kernels.ragged_paged_attention.arg_specs import SPECS
from tests.kernels.interpreters import INTERPRET

from . import naive
from .harness import check

PLAIN = [spec for spec in SPECS if not spec.scaled and spec.shards == 1]
"""Pools with scales and shards of pools have tests of their own."""


def case_of(spec, backend):
    shape = pool_shape(1, 1, spec.page_size, spec.kv_heads, spec.dim, np.dtype(spec.pool_dtype), backend)
    wide = spec.pool_dtype == "float32"
    return naive.Case(
        ((2, 1), (spec.page_size + 3, 1), (7, 4)),
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        dim=spec.dim,
        page_size=spec.page_size,
        layers=1,
        layer=0,
        pool_dtype=spec.pool_dtype,
        q_dtype="float32" if wide else "bfloat16",
        options={name: value for name, value in spec.keywords().items() if value is not None},
        sinks=spec.sinks,
        pack=shape[4],
        lanes=shape[5],
    )


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tpu", "gpu"])
@pytest.mark.parametrize("spec", PLAIN, ids=lambda spec: spec.name)
def test_the_kernel_matches_dense_attention(spec, backend):
    import ml_dtypes  # noqa: F401  (names the small float dtypes to numpy)

    check(case_of(spec, backend), backend, interpret=INTERPRET[backend])

"""Every real shape compiles for every target with the real compilers, and holds no second pool."""

import math

import pytest

from pallas_kernels.common.pool_copies import pool_copies
from pallas_kernels.latent_paged_attention.ahead_of_time import DECODE, PREFILL, compile_layers
from pallas_kernels.latent_paged_attention.arg_specs import SPECS
from sharding.topologies import topology

TARGETS = {
    "v5e:2x2": "tpu",
    "v5p:2x2x1": "tpu",
    "v6e:2x2": "tpu",
    "tpu7x:2x2x1": "tpu",
    "h100:8": "gpu",
    "h200:8": "gpu",
}
KNOWN = {("kimi-k2.5-int8", "tpu7x:2x2x1"), ("kimi-k2.5-fp8", "tpu7x:2x2x1"), ("deepseek-v3", "v5p:2x2x1")}
"""Prefill that takes more: 239 MB of 222 on TPU7x, which tiles the results in the tokens' order anew; 358 of 343."""


@pytest.mark.aot
@pytest.mark.parametrize("batch", [DECODE, PREFILL], ids=["decode", "mixed"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_it_compiles_with_temporaries_of_the_size_of_its_queries(spec, target, batch, request):
    """The blocks of queries, their results and those in the tokens' order; of a pool of 8 GiB, whatever the device."""
    if batch is PREFILL and (spec.name, target) in KNOWN:
        request.applymarker(pytest.mark.xfail(strict=True, raises=AssertionError, reason="more temporaries than that"))
    compiled, pool = compile_layers(spec, batch, topology(target)[0], TARGETS[target])
    pool_bytes = math.prod(pool.shape) * pool.dtype.itemsize
    query_bytes = batch.tokens * spec.heads * (spec.rank + spec.rope) * (2 if spec.shards == 1 else 4)
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    assert temporaries < 5 * query_bytes + (32 << 20)
    assert temporaries < 0.04 * pool_bytes
    assert pool_copies(compiled.as_text() or "", [pool.shape]) == []

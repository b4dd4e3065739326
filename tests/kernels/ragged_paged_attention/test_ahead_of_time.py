"""Every real shape compiles for every target with the real compilers, and holds no second pool."""

from math import prod

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels.common.pool_copies import pool_copies
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.ragged_paged_attention.ahead_of_time import DECODE, PREFILL, compile_layers
from pallas_kernels.ragged_paged_attention.arg_specs import SPECS, ArgSpec
from sharding.topologies import mesh, topology

TARGETS = {
    "v5e:2x2": "tpu",
    "v5p:2x2x1": "tpu",
    "v6e:2x2": "tpu",
    "tpu7x:2x2x1": "tpu",
    "h100:8": "gpu",
    "h200:8": "gpu",
}


@pytest.mark.aot
@pytest.mark.parametrize("batch", [DECODE, PREFILL], ids=["decode", "mixed"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_compiles_with_temporaries_below_two_percent_of_the_pool(spec, target, batch):
    compiled, pool = compile_layers(spec, batch, topology(target)[0], TARGETS[target])
    size = prod(pool.shape) * pool.dtype.itemsize
    assert compiled.memory_analysis().temp_size_in_bytes < 0.02 * size
    assert pool_copies(compiled.as_text() or "", [pool.shape]) == []


@pytest.mark.aot
@pytest.mark.parametrize("target", ["v5e:2x2", "h100:8"])
def test_heads_split_over_a_mesh_compile(target):
    platform = TARGETS[target]
    spec = ArgSpec("two-devices", 2, 8, 4, 128, sinks=True)
    args = spec.abstract(platform, 4, 16, 64)
    sinks = jax.ShapeDtypeStruct((spec.heads,), jnp.float32)
    heads, pool = P(None, "tensor"), P(None, None, None, "tensor")
    mapped = jax.shard_map(
        lambda *a: ragged_paged_attention(*a[:-1], sinks=a[-1], scale=0.1, backend=platform),
        mesh=mesh(target, (2,), ("tensor",)),
        in_specs=(heads, heads, heads, pool, *[P()] * 5, P("tensor")),
        out_specs=(heads, pool),
    )
    compiled = jax.jit(mapped, donate_argnums=3).lower(*args, sinks).compile()
    assert "all-" not in compiled.as_text()

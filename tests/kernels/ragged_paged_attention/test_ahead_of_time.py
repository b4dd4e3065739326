"""Every real shape compiles for every target with the real compilers, and holds no second pool."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.ragged_paged_attention.arg_specs import SPECS, ArgSpec
from sharding.topologies import EVERY_KIND, mesh


@pytest.mark.aot
@pytest.mark.parametrize("batch", ["decode", "prefill"])
@pytest.mark.parametrize("target", EVERY_KIND)
@pytest.mark.parametrize("name", [spec.name for spec in SPECS])
def test_compiles_with_temporaries_below_two_percent_of_the_pool(compiled_row, name, target, batch):
    row = compiled_row("ragged_paged_attention", target, name, batch)  # a copy of the pool raises
    assert row.pool_bytes > 0
    assert row.temp_bytes < 0.02 * row.pool_bytes


@pytest.mark.aot
@pytest.mark.parametrize(("target", "platform"), [("v5e:2x2", "tpu"), ("h100:8", "gpu")])
def test_heads_split_over_a_mesh_compile(target, platform):
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

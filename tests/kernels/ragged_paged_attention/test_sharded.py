"""The op inside `jax.shard_map` over heads equals the op on one device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.ragged_paged_attention import ragged_paged_attention

from . import naive
from .harness import ARRAYS


@pytest.mark.parametrize("backend", ["reference", "gpu"])
def test_heads_split_over_a_mesh_give_the_same_output_and_pool(backend):
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices: XLA_FLAGS=--xla_force_host_platform_device_count=2")
    case = naive.Case(((3, 1), (20, 1), (5, 9)), options={"scale": 0.125}, sinks=True)
    batch = naive.build(case)
    args = [jnp.asarray(batch[name]) for name in ARRAYS]
    op = partial(ragged_paged_attention, scale=0.125, backend=backend, interpret=backend != "reference")
    specs = dict.fromkeys(ARRAYS, P())
    specs |= dict.fromkeys(("q", "k", "v"), P(None, "tensor")) | {"kv_pool": P(None, None, None, "tensor")}
    mapped = jax.shard_map(
        lambda *args: op(*args[:-1], sinks=args[-1]),
        mesh=Mesh(np.array(jax.devices()[:2]), ("tensor",)),
        in_specs=(*specs.values(), P("tensor")),
        out_specs=(specs["q"], specs["kv_pool"]),
        check_vma=backend == "reference",  # Pallas's interpreter fails the check; compiled kernels pass it
    )
    out, pool = jax.jit(mapped)(*args, jnp.asarray(batch["sinks"]))
    np.testing.assert_allclose(out, naive.attend(case, batch), atol=1e-5, rtol=1e-5)
    np.testing.assert_array_equal(pool, naive.written(case, batch))

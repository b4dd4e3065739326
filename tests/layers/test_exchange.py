"""Rows that travel to their owners and back give what each owner would have made of them in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sharding.mesh import make_mesh
from trillion_infer.layers.exchange import exchange_rows, pays, plan_rows

ROWS, WIDTH = 12, 4


@pytest.mark.parametrize("axes", [("data",), ("data", "sequence")])
@pytest.mark.parametrize("seed", range(3))
def test_every_row_comes_back_from_its_owner(axes, seed):
    """Uneven owners, owners of nothing, rows that stay; the owner's number is added to what it gets."""
    mesh = make_mesh("data=2,sequence=4" if len(axes) == 2 else "data=8")
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(8 * ROWS, WIDTH)).astype(np.float32)
    owner = rng.integers(-1, [8, 3, 8][seed], 8 * ROWS).astype(np.int32)
    ids = np.arange(8 * ROWS, dtype=np.int32)

    def shard(rows, owner, ids):
        plan = plan_rows(owner, axes, 8)

        def run(arrived, held):
            values, numbers = arrived
            mark = jnp.float32(jax.lax.axis_index(axes))
            return jnp.where(held[:, None], values * 2 + mark + 1000.0 * numbers[:, None], jnp.nan)

        return exchange_rows((rows, ids), plan, run)

    spec = P(axes)
    found = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False))(
        rows, owner, ids
    )
    expected = np.where(owner[:, None] < 0, 0, rows * 2 + owner[:, None] + 1000.0 * ids[:, None])
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_few_tokens_and_many_choices_are_gathered():
    assert pays(1024, 1, 2)
    assert not pays(64, 1, 2)
    assert not pays(1024, 8, 8)
    assert pays(1024, 8, 16)

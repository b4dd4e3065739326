"""Slots of a shard, and the merge of shards inside shard_map."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.common.slot_shard import SlotShard, merge_over


@given(st.integers(1, 8), st.integers(1, 5), st.integers(0, 60))
def test_slots_below_a_position_are_those_whose_position_is_less(count, slots, position):
    per_shard = []
    for index in range(count):
        shard = SlotShard(jnp.int32(index), count)
        positions = shard.position(jnp.arange(100, dtype=jnp.int32), slots)
        assert int(shard.below(jnp.int32(position), slots)) == int((positions < position).sum())
        per_shard.append(np.asarray(positions[: 4 * slots]))
    assert sorted(np.concatenate(per_shard)) == list(range(4 * slots * count))


def test_no_shards_are_refused():
    with pytest.raises(ValueError, match="got count=0"):
        SlotShard(jnp.int32(0), 0)


@pytest.mark.parametrize("scatter", [None, 0, 1])
def test_the_merge_is_softmax_over_all_shards(scatter):
    count = 4
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(count, 8, 4, 5)) * 30
    scores[:, 3] = -np.inf
    scores[1, 2] = -np.inf
    values = rng.normal(size=(count, 8, 4, 5, 6))
    with np.errstate(divide="ignore", invalid="ignore"):
        top = np.where(np.isfinite(scores.max(-1)), scores.max(-1), 0)
        weights = np.exp(scores - top[..., None])
        out = np.nan_to_num(np.einsum("sthc,sthcd->sthd", weights, values) / weights.sum(-1)[..., None])
        lse = top + np.log(weights.sum(-1))
        whole = np.exp(scores - np.where(np.isfinite(scores.max((0, -1))), scores.max((0, -1)), 0)[None, ..., None])
        expected = np.nan_to_num(np.einsum("sthc,sthcd->thd", whole, values) / whole.sum((0, -1))[..., None])
    spec = P() if scatter is None else P(*[None] * scatter, "x")
    mapped = jax.shard_map(
        lambda out, lse: merge_over(out[0], lse[0], "x", scatter),
        mesh=Mesh(np.array(jax.devices()[:count]), ("x",)),
        in_specs=(P("x"), P("x")),
        out_specs=spec,
    )
    merged = jax.jit(mapped)(jnp.asarray(out, jnp.float32), jnp.asarray(lse, jnp.float32))
    np.testing.assert_allclose(merged, expected, atol=1e-5, rtol=1e-5)

"""A step cut into micro-batches: every token once, in order, with the lengths it had in the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from trillion_infer.layers.context import Sequences
from trillion_infer.layers.pipeline import AXIS, MICRO_TOKENS, MicroBatches, run_stages

ROWS, TOKENS, BLOCKS = 6, 64, 3


def step_of(decode: int, chunks: list[int]) -> tuple[Sequences, list[int], list[int]]:
    """A batch of so many decoding rows and then chunks; the lengths before the step and in it, by row."""
    extend = [1] * decode + chunks
    cached = [5 * row + 3 for row in range(len(extend))]
    cu = np.zeros(ROWS + 1, np.int32)
    cu[1 : len(extend) + 1] = np.cumsum(extend)
    cu[len(extend) + 1 :] = sum(extend)
    kv_lens = np.zeros(ROWS, np.int32)
    kv_lens[: len(extend)] = np.add(cached, extend)
    positions = np.zeros(TOKENS, np.int32)
    for row, count in enumerate(extend):
        positions[cu[row] : cu[row + 1]] = cached[row] + np.arange(count)
    table = np.arange(ROWS * BLOCKS, dtype=np.int32).reshape(ROWS, BLOCKS)
    num_seqs = np.array([decode, len(extend)], np.int32)
    arrays = (jnp.asarray(a) for a in (positions, kv_lens, cu, num_seqs))
    return Sequences(*arrays, (jnp.asarray(table),)), cached, extend


batches = st.integers(0, ROWS).flatmap(
    lambda decode: st.tuples(
        st.just(decode), st.lists(st.integers(2, 12), min_size=int(decode == 0), max_size=ROWS - decode)
    )
)


@settings(max_examples=60)
@given(batches, st.integers(1, 4))
def test_every_token_is_computed_once_with_its_own_history(batch, stages):
    whole, cached, extend = step_of(*batch)
    cut = MicroBatches.of(whole, jnp.arange(TOKENS, dtype=jnp.int32), stages)
    assert cut.count == min(stages, TOKENS // MICRO_TOKENS)
    done = list(cached)
    for number in range(cut.count):
        part, rope_lens = cut.at(jnp.int32(number), jnp.bool_(True))
        cu, (decode, real) = np.asarray(part.cu_q_lens), np.asarray(part.num_seqs)
        assert decode <= real
        assert np.all(np.diff(cu)[:decode] == 1)
        for row in range(real):
            sequence = int(part.page_tables[0][row, 0]) // BLOCKS
            length = int(cu[row + 1] - cu[row])
            assert length > 0
            assert int(part.kv_lens[row]) == done[sequence] + length
            positions = np.asarray(part.positions[cu[row] : cu[row + 1]])
            np.testing.assert_array_equal(positions, np.arange(done[sequence], done[sequence] + length))
            done[sequence] += length
        np.testing.assert_array_equal(np.asarray(part.kv_lens[real:]), 0)
        np.testing.assert_array_equal(cu[real:], cu[real])
        np.testing.assert_array_equal(rope_lens, cut.token[number])
    assert done == [a + b for a, b in zip(cached, extend, strict=True)]


@given(batches, st.integers(1, 4))
def test_places_put_the_micro_batches_back_together(batch, stages):
    whole, _, extend = step_of(*batch)
    cut = MicroBatches.of(whole, jnp.zeros(TOKENS, jnp.int32), stages)
    back = np.asarray(cut.token).reshape(-1)[np.asarray(cut.places(TOKENS))]
    np.testing.assert_array_equal(back[: sum(extend)], np.arange(sum(extend)))


@given(batches)
def test_micro_batches_differ_by_less_than_their_number(batch):
    whole, _, extend = step_of(*batch)
    cut = MicroBatches.of(whole, jnp.zeros(TOKENS, jnp.int32), 4)
    sizes = np.asarray(cut.sequences["cu_q_lens"])[:, -1]
    assert sizes.sum() == sum(extend)
    assert sizes.max() == -(-sum(extend) // cut.count)


def test_an_idle_stage_gets_no_token():
    whole, _, _ = step_of(3, [7])
    part, _ = MicroBatches.of(whole, jnp.zeros(TOKENS, jnp.int32), 2).at(jnp.int32(0), jnp.bool_(False))
    for counts in (part.cu_q_lens, part.num_seqs, part.kv_lens):
        assert not np.any(counts)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_every_token_passes_every_stage_in_order_and_the_bubble_is_one_tick_a_stage(stages):
    """Stage s makes 3x + s of x; a pool counts the ticks, of which M micro-batches take M + stages - 1."""
    whole, _, extend = step_of(2, [12, 11, 10, 9])
    tokens = sum(extend)
    mesh = Mesh(np.array(jax.devices()[:stages]), (AXIS,))

    def run(x, pools, sequences, rope_lens, stage):
        return 3.0 * x + stage.astype(x.dtype), (pools[0] + 1,)

    def on_stage(x, ticks):
        cut = MicroBatches.of(whole, jnp.zeros(TOKENS, jnp.int32), stages)
        y, pools = run_stages(run, x, (ticks,), cut, stages)
        return y, pools[0]

    program = jax.shard_map(on_stage, mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=(P(), P(AXIS)), check_vma=False)
    x = jnp.arange(TOKENS * 2, dtype=jnp.float32).reshape(TOKENS, 2)
    y, ticks = jax.jit(program)(x, jnp.zeros(stages, jnp.int32))
    expected = x
    for stage in range(stages):
        expected = 3.0 * expected + stage
    np.testing.assert_array_equal(y[:tokens], expected[:tokens])
    np.testing.assert_array_equal(ticks, min(stages, TOKENS // MICRO_TOKENS) + stages - 1)

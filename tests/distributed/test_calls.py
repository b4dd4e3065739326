"""Calls that one side records and another repeats leave both with the same arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from trillion_infer.distributed.calls import Recorder, Replayer
from trillion_infer.distributed.wire import pack, unpack


@pytest.fixture
def sides():
    """A recorder, the replayer that hears it, and a program of theirs: add(state, numbers) -> (state, sum)."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    split = NamedSharding(mesh, P("x"))

    def add(state, numbers):
        return state + numbers, (state + numbers).sum()

    shapes = [jax.ShapeDtypeStruct((4,), jnp.int32, sharding=split)] * 2
    program = jax.jit(add, donate_argnums=0, out_shardings=(split, NamedSharding(mesh, P()))).lower(*shapes).compile()
    replayer = Replayer({"add": program}.__getitem__, mesh)
    refusals: list[str | None] = []
    recorder = Recorder(lambda message: refusals.append(replayer.obey(unpack(pack(message)))), mesh)
    states = [jax.device_put(jnp.arange(4, dtype=jnp.int32), split) for _ in range(2)]
    recorder.know(states[0])
    replayer.know(states[1])
    return recorder, replayer, recorder.wrap("add", program), states[0], refusals


def test_a_chain_of_calls_is_repeated(sides):
    recorder, _, add, state, refusals = sides
    for step in range(5):
        numbers = recorder.place(np.full(4, step, np.int32), NamedSharding(state.sharding.mesh, P("x")))
        state, total = add(state, numbers)
        recorder.compare(step, total)
        recorder.compare(step, state)
    assert int(total) == 6 + 4 * 10
    assert set(refusals) == {None}


def test_what_the_leader_drops_the_follower_drops(sides):
    _, replayer, add, state, _ = sides
    for _ in range(20):
        state, _ = add(state, np.zeros(4, np.int32))
    assert len(replayer._arrays) < 6


def test_a_difference_is_reported(sides):
    recorder, replayer, add, state, refusals = sides
    state, total = add(state, np.ones(4, np.int32))
    replayer._arrays[max(replayer._arrays)] = jnp.int32(0)
    recorder.compare(7, total)
    assert refusals[-1] == "the tokens of step 7 differ from the leader's"


def test_an_array_that_nobody_was_told_of_is_refused(sides):
    _, _, add, state, _ = sides
    with pytest.raises(RuntimeError, match="followers do not have"):
        add(state, jnp.ones(4, jnp.int32))

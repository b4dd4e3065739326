"""A pool split along its slots gives, merged over its shards, the attention over the whole pool."""

import dataclasses
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from tests.kernels.interpreters import BACKENDS, INTERPRET, on_each_backend

from . import naive
from .harness import ARRAYS, CASES, TOLERANCE

LENS = ((0, 1), (15, 1), (40, 1), (0, 20), (17, 5), (20, 3))
NAMES = ("mixed", "window", "window_of_one", "chunk", "soft_cap", "sinks", "multi_query", "verification", "bfloat16")


def shard_case(name, backend):
    lens = CASES[name].lens if name == "verification" else LENS
    case = dataclasses.replace(CASES[name], lens=lens, pack=1)
    if backend == "tpu":
        case = dataclasses.replace(case, pack=4 // np.dtype(case.pool_dtype).itemsize, lanes=128)
    return dataclasses.replace(case, options={"scale": case.dim**-0.5, **case.options})


def run(case, backend, count, over_shards):
    batch = naive.build(case)
    sinks = None if batch["sinks"] is None else jnp.asarray(batch["sinks"])
    op = partial(
        ragged_paged_attention, **case.options, sinks=sinks, backend=backend, interpret=INTERPRET.get(backend, False)
    )
    out, (pool,), parts = over_shards(
        lambda *args: op(*args[:-1], slots=args[-1]), [batch[name] for name in ARRAYS], {3: 2}, count
    )
    return batch, out, pool, parts


@pytest.mark.parametrize(("name", "backend"), on_each_backend(NAMES, quick=("window", "sinks")))
def test_the_merged_shards_equal_dense_attention(name, backend, over_shards):
    case, count = shard_case(name, backend), (2, 4, 8)[NAMES.index(name) % 3]
    batch, out, pool, _ = run(case, backend, count, over_shards)
    tolerance = TOLERANCE[case.q_dtype]
    np.testing.assert_allclose(out, naive.attend(case, batch), atol=tolerance, rtol=tolerance)
    expected = naive.written(case, batch)
    np.testing.assert_array_equal(pool.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_shard_without_a_position_in_view_says_so(backend, over_shards):
    case = shard_case("window", backend)
    case = dataclasses.replace(case, lens=((2, 1), (30, 1), (30, 2)), options={**case.options, "window": 1})
    _, _, _, parts = run(case, backend, 8, over_shards)
    owners = [2 // 2, 30 % 16 // 2, 30 % 16 // 2, 31 % 16 // 2]
    for index, (out, lse) in enumerate(parts):
        mine = np.array([*(owner == index for owner in owners), *[False] * case.padded_tokens])
        assert (np.isfinite(lse) == mine[:, None]).all()
        assert (lse[~mine] == -np.inf).all()
        assert (out[~mine] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_shard_is_the_whole_pool(backend, over_shards):
    case = shard_case("sinks", backend)
    batch, out, _, _ = run(case, backend, 1, over_shards)
    np.testing.assert_allclose(out, naive.attend(case, batch), atol=1e-5, rtol=1e-5)

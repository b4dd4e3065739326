"""A latent pool split along its slots gives, merged over its shards, the attention over the whole pool."""

from functools import partial

import latent_cases
import numpy as np
import pytest
from latent_cases import Case

from pallas_kernels.latent_paged_attention import latent_paged_attention
from tests.kernels.interpreters import BACKENDS, INTERPRET, on_each_backend

SHAPE = {"rank": 128, "rope": 32, "width": 256, "page_size": 64}
CASES = {
    "decode": (Case(((0, 1), (15, 1), (16, 1), (700, 1)), **SHAPE), 8),
    "mixed": (Case(((0, 1), (16, 1), (130, 1), (0, 40), (17, 5), (100, 60), (20, 0)), **SHAPE), 4),
    "verification": (Case(((5, 1), (40, 4), (31, 8), (0, 2)), **SHAPE), 8),
    "bfloat16": (Case(((0, 1), (130, 1), (17, 5)), dtype="bfloat16", **SHAPE), 2),
    "nothing": (Case((), padded_tokens=8, padded_seqs=4, **SHAPE), 2),
}


def run(case, backend, count, over_shards):
    batch = latent_cases.build(case)
    op = partial(latent_paged_attention, scale=case.scale, backend=backend, interpret=INTERPRET.get(backend, False))
    out, (pool,), parts = over_shards(lambda *args: op(*args[:-1], slots=args[-1]), batch.args, {4: 2}, count)
    return batch, out, pool, parts


@pytest.mark.parametrize(("name", "backend"), on_each_backend(CASES, quick=("verification", "nothing")))
def test_the_merged_shards_equal_dense_attention(name, backend, over_shards):
    case, count = CASES[name]
    batch, out, pool, _ = run(case, backend, count, over_shards)
    tolerance = latent_cases.TOLERANCE[case.dtype]
    np.testing.assert_allclose(out, latent_cases.attend(case, batch), atol=tolerance, rtol=tolerance)
    expected = latent_cases.written(case, batch)
    np.testing.assert_array_equal(pool.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_shard_without_a_position_in_view_says_so(backend, over_shards):
    case = Case(((2, 1), (0, 12)), **SHAPE)
    _, _, _, parts = run(case, backend, 8, over_shards)
    positions = np.array([2, *range(12), *[-1] * case.padded_tokens])
    for index, (out, lse) in enumerate(parts):
        sees = positions >= index * 8
        assert (np.isfinite(lse) == sees[:, None]).all()
        assert (lse[~sees] == -np.inf).all()
        assert (out[~sees] == 0).all()

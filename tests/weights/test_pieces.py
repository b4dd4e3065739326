"""Pieces tile a region exactly, whatever the shards and the block size."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trillion_infer.weights.pieces import pieces
from trillion_infer.weights.plan import Region

pytestmark = pytest.mark.smoke


@st.composite
def cases(draw):
    shape = draw(st.lists(st.sampled_from([1, 2, 4, 6, 12]), min_size=1, max_size=3))
    box, dropped = [], []
    for axis, size in enumerate(shape):
        if draw(st.booleans()) and len(dropped) < len(shape) - 1:
            at = draw(st.integers(0, size - 1))
            box.append((at, at + 1, 1))
            dropped.append(axis)
        else:
            low = draw(st.integers(0, size - 1))
            box.append((low, draw(st.integers(low + 1, size)), draw(st.integers(1, 3))))
    cuts = [draw(st.sampled_from([n for n in (1, 2, 3) if size % n == 0])) for size in shape]
    return shape, Region("t", tuple(box), tuple(dropped)), cuts, draw(st.one_of(st.none(), st.integers(1, 20)))


@given(cases())
def test_every_value_is_placed_once(case):
    shape, region, cuts, limit = case
    tensor = np.arange(1, 1 + math.prod(region.shape)).reshape(region.shape)
    expected = np.zeros(shape, np.int64)
    expected[tuple(b[0] if a in region.dropped else slice(*b) for a, b in enumerate(region.box))] = tensor
    actual, written = np.zeros(shape, np.int64), 0
    for corner in np.ndindex(*cuts):
        bounds = tuple((i * s // n, (i + 1) * s // n) for i, s, n in zip(corner, shape, cuts, strict=True))
        shard = actual[tuple(slice(*b) for b in bounds)]
        for piece in pieces(region, bounds, limit):
            assert limit is None or piece.size <= limit
            piece.squeeze(shard[piece.target])[...] = tensor[piece.source]
            written += piece.size
    np.testing.assert_array_equal(actual, expected)
    assert written == tensor.size

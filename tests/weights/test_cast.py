"""Copies round as a cast does, whatever the memory order."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trillion_infer.weights.cast import convertible, copy_into

pytestmark = pytest.mark.smoke

FLOATS = [np.float32, np.float16, ml_dtypes.bfloat16]


@given(
    st.sampled_from(FLOATS),
    st.sampled_from(FLOATS),
    st.permutations([0, 1, 2]),
    st.permutations([0, 1, 2]),
    st.tuples(*[st.integers(1, 130)] * 3).filter(lambda s: s[0] * s[1] * s[2] < 20000),
)
def test_equals_astype_for_any_order_of_axes(source_type, target_type, source_order, target_order, shape):
    source = np.random.default_rng(0).standard_normal(shape).astype(source_type).transpose(source_order)
    base = np.empty([source.shape[a] for a in target_order], target_type)
    target = base.transpose(np.argsort(target_order))
    copy_into(target, source)
    np.testing.assert_array_equal(target, source.astype(target_type))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 0.0, -0.0, 3.3895e38, 1e-45, 1.00390625, 1.01171875])
def test_special_values_survive_both_ways(value):
    one = np.full((2, 3), value, np.float32)
    low = np.empty((2, 3), ml_dtypes.bfloat16)
    copy_into(low, one)
    np.testing.assert_array_equal(low.astype(np.float32), one.astype(ml_dtypes.bfloat16).astype(np.float32))
    back = np.empty((2, 3), np.float32)
    copy_into(back, low)
    np.testing.assert_array_equal(back, low.astype(np.float32))
    np.testing.assert_array_equal(np.signbit(back), np.signbit(one))


def test_integers_and_fp8_are_not_convertible_to_bfloat16():
    bf16 = np.dtype(ml_dtypes.bfloat16)
    assert convertible(np.dtype(np.float32), bf16)
    assert not convertible(np.dtype(np.int32), bf16)
    assert not convertible(np.dtype(ml_dtypes.float8_e4m3fn), bf16)
    assert convertible(np.dtype(np.int32), np.dtype(np.int32))

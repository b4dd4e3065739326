"""The quantiser's error bound, and the refusal of scales that do not fit."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pallas_kernels.common.quantised_pool import LIMITS, check_scales, quantise

numbers = st.floats(-1e4, 1e4, width=32).map(lambda x: x if abs(x) > 1e-30 else 0.0)
vectors = hnp.arrays(np.float32, (3, 16), elements=numbers)


@given(vectors)
def test_int8_is_off_by_at_most_half_a_scale(x):
    numbers, scale = (np.asarray(a, np.float64) for a in quantise(jnp.asarray(x), "int8"))
    assert (np.abs(numbers * scale[:, None] - x) <= 0.5 * scale[:, None] * (1 + 1e-5)).all()


@given(vectors)
def test_fp8_is_off_by_at_most_a_sixteenth_or_half_its_smallest_step(x):
    numbers, scale = (np.asarray(a, np.float64) for a in quantise(jnp.asarray(x), "float8_e4m3fn"))
    bound = np.maximum(np.abs(x) / 16, scale[:, None] * 2.0**-10) * (1 + 1e-5)
    assert (np.abs(numbers * scale[:, None] - x) <= bound).all()


@pytest.mark.parametrize("dtype", LIMITS)
def test_the_largest_magnitude_is_kept_and_zeros_stay_zeros(dtype):
    x = jnp.asarray([[0.5, -3.0, 1.0], [0.0, 0.0, 0.0]])
    numbers, scale = quantise(x, dtype)
    np.testing.assert_allclose(np.asarray(numbers, np.float32)[0, 1] * scale[0], -3.0, rtol=1e-6)
    assert scale[1] == 0
    assert (np.asarray(numbers, np.float32)[1] == 0).all()


def test_int8_rounds_ties_to_even():
    numbers, _ = quantise(jnp.asarray([127.0, 0.5, 1.5, 2.5, -0.5, -1.5]), "int8")
    assert numbers.tolist() == [127, 0, 2, 2, 0, -2]


@pytest.mark.parametrize(
    ("dtype", "shape", "message"),
    [
        ("bfloat16", (2, 9, 4, 16), "op: scales go with a pool of int8 or float8_e4m3fn; this pool has bfloat16"),
        ("int8", (2, 9, 16, 4), r"of shape \(2, 9, 4, 16\) .* got float32 of \(2, 9, 16, 4\)"),
    ],
)
def test_scales_that_do_not_fit_are_refused_with_both_sides_named(dtype, shape, message):
    with pytest.raises(ValueError, match=message):
        check_scales("op", jnp.zeros((2, 9, 16, 4, 1, 8), dtype), jnp.zeros(shape), 4)

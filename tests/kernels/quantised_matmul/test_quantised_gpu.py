"""The Triton kernel of the weight-only matmul in interpret mode against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantised_matmul import QuantisedTensor, quantise, quantised_matmul
from pallas_kernels.quantised_matmul.formats import FORMATS

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
interpreted = jax.jit(functools.partial(quantised_matmul, backend="gpu", interpret=True))


def draw(*shape, dtype="float32", seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def check(x, t, **kwargs):
    y = np.asarray(interpreted(x, t, **kwargs), np.float64)
    expected = np.asarray(quantised_matmul(x, t, backend="reference", **kwargs), np.float64)
    assert np.abs(y - expected).max() <= TOLERANCE[x.dtype.name] * np.abs(expected).max()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("format", FORMATS)
def test_it_equals_the_reference(format, dtype):
    t = jax.jit(functools.partial(quantise, format=format))(draw(2, 200, 320, dtype=dtype))
    check(draw(19, 320, dtype=dtype, seed=1), t, layer=1)


def test_fp8_scales_may_be_given_by_row():
    t = quantise(draw(256, 256), "fp8")
    check(draw(3, 256), QuantisedTensor(t.packed, jnp.repeat(t.scale, 128, axis=0), "fp8", 128))

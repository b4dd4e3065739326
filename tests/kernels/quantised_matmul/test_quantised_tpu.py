"""The TPU kernel of the weight-only matmul in interpret mode against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common.backends import UnsupportedError
from pallas_kernels.quantised_matmul import QuantisedTensor, quantise, quantised_matmul
from pallas_kernels.quantised_matmul.formats import FORMATS

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
interpreted = functools.partial(quantised_matmul, backend="tpu", interpret=pltpu.InterpretParams(detect_races=True))


def draw(*shape, dtype="float32", seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("format", FORMATS)
def test_it_equals_the_reference(format, dtype):
    x = draw(19, 320, dtype=dtype, seed=1)
    t = jax.jit(functools.partial(quantise, format=format))(draw(2, 1300, 320, dtype=dtype))
    y = jax.jit(interpreted)(x, t, layer=1)
    expected = np.asarray(quantised_matmul(x, t, layer=1, backend="reference"), np.float64)
    error = np.abs(np.asarray(y, np.float64) - expected).max()
    assert error <= TOLERANCE[dtype] * np.abs(expected).max()


def test_fp8_scales_by_row_are_refused_with_the_reason():
    t = quantise(draw(256, 256), "fp8")
    by_row = QuantisedTensor(t.packed, jnp.repeat(t.scale, 128, axis=0), "fp8", 128)
    with pytest.raises(UnsupportedError, match="tpu: fp8 scales must be given for blocks of 128x128"):
        quantised_matmul(draw(4, 256), by_row, backend="tpu")

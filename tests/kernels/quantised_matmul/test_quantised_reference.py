"""Weight-only matmul against the matmul of its dequantised twin."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantised_matmul import QuantisedTensor, dequantise
from pallas_kernels.quantised_matmul import quantise as quantise_eagerly
from pallas_kernels.quantised_matmul import quantised_matmul as any_backend
from pallas_kernels.quantised_matmul.formats import FORMATS

quantise = functools.partial(jax.jit, static_argnames="format")(quantise_eagerly)
quantised_matmul = functools.partial(any_backend, backend="reference")
TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2}
SHAPES = {"one_row": (1, 48, 64), "cut_blocks": (5, 200, 160), "many_row_blocks": (3, 2100, 1024)}


def draw(*shape, dtype="float32", seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("format", FORMATS)
def test_it_equals_the_matmul_of_the_dequantised_weight(format, dtype, shape):
    tokens, n_out, n_in = shape
    x, t = draw(tokens, n_in, dtype=dtype, seed=1), quantise(draw(n_out, n_in), format)
    y = jax.jit(quantised_matmul)(x, t)
    expected = np.asarray(x, np.float64) @ np.asarray(dequantise(t), np.float64).T
    assert y.dtype == x.dtype
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, atol=TOLERANCE[dtype] * np.abs(expected).max())


@pytest.mark.parametrize("format", FORMATS)
def test_a_layer_of_a_stack_is_that_layer_alone(format):
    x, t = draw(4, 256, seed=1), quantise(draw(3, 150, 256), format)
    for layer in range(3):
        alone = jax.tree.map(lambda leaf, i=layer: leaf[i], t)
        y = jax.jit(quantised_matmul)(x, t, layer=layer)
        np.testing.assert_array_equal(y, quantised_matmul(x, alone))


def test_fp8_scales_may_be_given_by_row():
    x, t = draw(3, 256), quantise(draw(256, 256), "fp8")
    by_row = QuantisedTensor(t.packed, jnp.repeat(t.scale, 128, axis=0), "fp8", 128)
    np.testing.assert_array_equal(quantised_matmul(x, by_row), quantised_matmul(x, t))


@pytest.mark.parametrize("format", FORMATS)
def test_temporaries_stay_far_below_the_dequantised_weight(format):
    x, t = draw(4, 2048), quantise(draw(8192, 2048), format)
    compiled = jax.jit(quantised_matmul).lower(x, t).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 8192 * 2048 * 4 / 3


def test_columns_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="x must have in=64 columns"):
        quantised_matmul(draw(4, 32), quantise(draw(8, 64), "int8"))


def test_a_stack_without_a_layer_is_refused():
    with pytest.raises(ValueError, match=r"weight must have 2 axes \(of one layer\); got shape \(3, 8, 64\)"):
        quantised_matmul(draw(4, 64), quantise(draw(3, 8, 64), "int8"))


def test_integer_activations_are_refused():
    with pytest.raises(ValueError, match="x has dtype int32; allowed are float32"):
        quantised_matmul(draw(4, 64).astype(jnp.int32), quantise(draw(8, 64), "int8"))

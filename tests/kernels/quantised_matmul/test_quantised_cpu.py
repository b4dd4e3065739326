"""The native backend of the weight-only matmul against the reference."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.backends import UnsupportedError
from pallas_kernels.cpu_native import native
from pallas_kernels.quantised_matmul import quantise, quantised_matmul

needs_native = pytest.mark.skipif(not native().isas, reason=native().reason or "native kernels are here")


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@needs_native
@pytest.mark.parametrize("format", ["int8", "int4", "int4_affine", "fp8_row"])
def test_it_equals_the_reference(format):
    x, t = draw(5, 128, seed=1), quantise(draw(2, 40, 128), format)
    y = quantised_matmul(x, t, layer=1, backend="cpu")
    expected = quantised_matmul(x, t, layer=1, backend="reference")
    np.testing.assert_allclose(y, expected, atol=1e-5 * np.abs(expected).max())


def test_a_format_without_a_native_kernel_is_refused_with_the_reason():
    with pytest.raises(UnsupportedError, match="cpu: there are no native products of fp8 weights"):
        quantised_matmul(draw(2, 128), quantise(draw(8, 128), "fp8"), backend="cpu")

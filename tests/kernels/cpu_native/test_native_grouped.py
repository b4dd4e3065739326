import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.cpu_native import native
from pallas_kernels.cpu_native.matmul import grouped_matmul, matmul, quantised_grouped_matmul
from pallas_kernels.quantised_matmul import dequantise, quantise

pytestmark = pytest.mark.skipif(not native().isas, reason=native().reason)


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def by_expert(x, w, sizes):
    """Each group times its own matrix, in float64; 0 for the rows after all groups."""
    out = np.zeros((x.shape[0], w.shape[1]))
    start = 0
    for expert, size in enumerate(sizes):
        rows = slice(start, start + size)
        out[rows] = np.asarray(x[rows], np.float64) @ np.asarray(w[expert], np.float64).T
        start += size
    return out


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.sampled_from([0, 0, 1, 2, 5, 30]), min_size=1, max_size=6),
    padding=st.integers(0, 3),
    format=st.sampled_from(["float32", "bfloat16", "int8", "int4", "int4_affine", "fp8_row"]),
    layer=st.integers(0, 1),
)
def test_each_group_is_multiplied_with_its_expert(sizes, padding, format, layer):
    x = normal(0, sum(sizes) + padding, 64)
    w = normal(1, 2, len(sizes), 30, 64)
    counts = jnp.asarray(sizes, jnp.int32)
    if format in ("int8", "int4", "int4_affine", "fp8_row"):
        packed = quantise(w, format)
        got = quantised_grouped_matmul(x, packed.packed, packed.scale, counts, layer)
        w = dequantise(packed)
    else:
        w = w.astype(format)
        got = grouped_matmul(x, w, counts, layer)
    np.testing.assert_allclose(got, by_expert(x, w[layer], sizes), rtol=2e-5, atol=1e-4)


def test_experts_without_rows_are_not_read():
    w = normal(2, 3, 16, 64).at[1].set(jnp.nan)
    got = grouped_matmul(normal(3, 8, 64), w, jnp.array([5, 0, 3], jnp.int32))
    assert np.isfinite(np.asarray(got)).all()


def test_a_row_has_the_same_bits_as_with_its_expert_alone():
    x, w = normal(4, 50, 96), normal(5, 3, 40, 96).astype(jnp.bfloat16)
    got = grouped_matmul(x, w, jnp.array([20, 1, 29], jnp.int32))
    np.testing.assert_array_equal(np.asarray(got[20]), np.asarray(matmul(x[20:21], w[1])[0]))
    np.testing.assert_array_equal(np.asarray(got[21:]), np.asarray(matmul(x[21:], w[2])))


@pytest.mark.parametrize("sizes", [[5, 4], [-1, 3]])
def test_sizes_that_do_not_fit_are_an_error(sizes):
    with pytest.raises(Exception, match="group_sizes"):
        jax.block_until_ready(grouped_matmul(normal(6, 8, 32), normal(7, 2, 8, 32), jnp.array(sizes, jnp.int32)))


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"group_sizes \[E\]"):
        grouped_matmul(normal(6, 8, 32), normal(7, 2, 8, 32), jnp.array([1, 2, 3], jnp.int32))

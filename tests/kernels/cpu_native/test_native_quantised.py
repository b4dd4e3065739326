import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_blocks import GGUF, random_blocks

from pallas_kernels.cpu_native import native
from pallas_kernels.cpu_native.matmul import gguf_matmul, quantised_matmul
from pallas_kernels.quantised_matmul import dequantise, quantise

pytestmark = pytest.mark.skipif(not native().isas, reason=native().reason)

ISAS = st.sampled_from(native().isas or ("auto",))
ROWS = st.integers(1, 20) | st.sampled_from([130])


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def close(got, x, w):
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=2e-5, atol=2e-6 * x.shape[1])


@settings(deadline=None, max_examples=20)
@given(
    rows=ROWS,
    columns=st.sampled_from([1, 7, 40]),
    groups=st.sampled_from([1, 3, 13]),
    format=st.sampled_from(["int8", "int4", "int4_affine", "fp8_row"]),
    group=st.sampled_from([32, 64, 128]),
    scale_dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
    isa=ISAS,
)
def test_int8_and_int4_are_the_product_of_the_dequantised_weight(
    rows, columns, groups, format, group, scale_dtype, isa
):
    depth = groups * group
    x = jnp.asarray(normal(0, rows, depth))
    w = quantise(jnp.asarray(normal(1, 2, columns, depth)).astype(scale_dtype), format, group=group)
    got = quantised_matmul(x, w.packed, w.scale, 1, isa=isa)
    close(got, x, dequantise(w)[1])


@settings(deadline=None, max_examples=40)
@given(
    rows=ROWS,
    columns=st.integers(1, 40),
    blocks=st.integers(1, 30),
    format=st.sampled_from(sorted(GGUF)),
    isa=ISAS,
)
def test_gguf_blocks_are_the_product_of_the_dequantised_weight(rows, columns, blocks, format, isa):
    depth = blocks * GGUF[format] if format != "Q4_K" else (blocks % 8 + 1) * 256
    stored = random_blocks(format, columns, depth)
    x = jnp.asarray(normal(2, rows, depth))
    w = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[format])
    expected = np.asarray(x, np.float64) @ w.astype(np.float64).T
    got = gguf_matmul(x, jnp.asarray(stored), format=format, isa=isa)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=3e-6 * np.abs(w).max() * depth)


@pytest.mark.parametrize("format", sorted(GGUF))
def test_a_row_of_a_packed_product_has_the_same_bits_alone_and_in_a_batch(format: str):
    blocks = jnp.asarray(random_blocks(format, 50, 1024))
    x = jnp.asarray(normal(3, 40, 1024))
    whole = np.asarray(gguf_matmul(x, blocks, format=format))
    for start, stop in ((0, 1), (3, 5), (7, 10), (20, 24), (1, 40)):
        np.testing.assert_array_equal(whole[start:stop], np.asarray(gguf_matmul(x[start:stop], blocks, format=format)))


@pytest.mark.parametrize("format", ["int8", "int4", "int4_affine", "fp8_row"])
def test_a_row_of_a_quantised_product_has_the_same_bits_alone_and_in_a_batch(format: str):
    w = quantise(jnp.asarray(normal(4, 50, 1024)), format)
    x = jnp.asarray(normal(5, 40, 1024))
    whole = np.asarray(quantised_matmul(x, w.packed, w.scale))
    for start, stop in ((0, 1), (3, 5), (7, 10), (20, 24), (1, 40)):
        np.testing.assert_array_equal(whole[start:stop], np.asarray(quantised_matmul(x[start:stop], w.packed, w.scale)))


def test_formats_and_shapes_that_do_not_fit_are_refused():
    x = jnp.zeros((2, 64))
    with pytest.raises(ValueError, match="'Q2_K' has no native kernel"):
        gguf_matmul(x, jnp.zeros((4, 18), jnp.uint8), format="Q2_K")
    with pytest.raises(ValueError, match="20 bytes for 32 elements"):
        gguf_matmul(x, jnp.zeros((4, 18), jnp.uint8), format="Q4_1")
    with pytest.raises(ValueError, match="groups of 32, 64 or 128"):
        quantised_matmul(x, jnp.zeros((4, 8), jnp.int32), jnp.zeros((4, 4)))
    with pytest.raises(ValueError, match=r"takes a scale \[L, N\]"):
        quantised_matmul(x, jnp.zeros((4, 64), jnp.int8), jnp.zeros((5,)))

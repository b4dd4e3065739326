import hashlib

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_blocks import GGUF, random_blocks

from pallas_kernels.cpu_native import native
from pallas_kernels.cpu_native.matmul import gguf_matmul, quantised_grouped_matmul, quantised_matmul
from pallas_kernels.quantised_matmul import dequantise, quantise

pytestmark = pytest.mark.skipif(not native().isas, reason=native().reason)

ISAS = native().isas or ("auto",)
FORMATS = (*sorted(GGUF), "int8", "int4", "int4_affine")


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def rounded(x) -> np.ndarray:
    """x in steps of a 127th of the greatest magnitude of 32 elements, as numbers."""
    groups = np.asarray(x, np.float32).reshape(len(x), -1, 32)
    most = np.abs(groups).max(-1, keepdims=True)
    by = np.divide(np.float32(127), most, out=np.zeros_like(most), where=most > 0)
    return (np.rint(groups * by) * np.float64(most / np.float32(127))).reshape(x.shape)


def weight_of(format: str, columns: int, depth: int, *, layers: int = 1, group: int = 32, scale_dtype="float32"):
    """A stack in this format, what multiplies it with an x, and its values."""
    if format in GGUF:
        stored = np.stack([random_blocks(format, columns, depth, seed) for seed in range(layers)])
        values = np.stack([gguf.quants.dequantize(w, gguf.GGMLQuantizationType[format]) for w in stored])
        return values, lambda x, layer, **how: gguf_matmul(x, jnp.asarray(stored), layer, format=format, **how)
    t = quantise(jnp.asarray(normal(1, layers, columns, depth)).astype(scale_dtype), format, group=group)
    return np.asarray(dequantise(t)), lambda x, layer, **how: quantised_matmul(x, t.packed, t.scale, layer, **how)


@settings(deadline=None, max_examples=50)
@given(
    format=st.sampled_from(FORMATS),
    rows=st.integers(1, 17) | st.sampled_from([130]),
    columns=st.sampled_from([32, 33, 40, 61, 150]),
    depth=st.sampled_from([256, 768]) | st.integers(1, 12).map(lambda groups: 32 * groups),
    layers=st.integers(1, 3),
    group=st.sampled_from([32, 64, 128]),
    scale_dtype=st.sampled_from(["float32", "bfloat16"]),
    isa=st.sampled_from(ISAS),
    x_dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_is_the_product_of_rounded_groups(format, rows, columns, depth, layers, group, scale_dtype, isa, x_dtype):
    unit = 256 if format == "Q4_K" else group if format in ("int4", "int4_affine") else 32
    depth = -(-depth // unit) * unit
    values, times = weight_of(format, columns, depth, layers=layers, group=group, scale_dtype=scale_dtype)
    x = jnp.asarray(normal(0, rows, depth)).astype(x_dtype)
    got = times(x, layers - 1, isa=isa, int8_activations=True, out_dtype=jnp.float32)
    expected = rounded(x) @ values[-1].astype(np.float64).T
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())
    plain = np.asarray(x, np.float64) @ values[-1].astype(np.float64).T
    assert np.linalg.norm(got - plain) < 0.02 * np.linalg.norm(plain)


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_has_the_same_bits_in_every_batch_and_instruction_set(format: str):
    _, times = weight_of(format, 70, 768)
    x = jnp.asarray(normal(3, 140, 768))
    whole = np.asarray(times(x, 0, int8_activations=True))
    for start, stop in ((0, 1), (3, 5), (7, 10), (20, 24), (1, 17), (5, 138)):
        for isa in ISAS:
            alone = np.asarray(times(x[start:stop], 0, isa=isa, int8_activations=True))
            np.testing.assert_array_equal(whole[start:stop], alone)


def test_one_thread_gives_the_bits_of_many(run_python):
    w = quantise(jnp.asarray(normal(4, 300, 256)), "int4")
    many = quantised_matmul(jnp.asarray(normal(5, 40, 256)), w.packed, w.scale, int8_activations=True)
    digest = run_python("""
        import hashlib, os
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
        import jax.numpy as jnp, numpy as np
        from pallas_kernels.cpu_native.matmul import quantised_matmul
        from pallas_kernels.quantised_matmul import quantise
        x, w = (np.random.default_rng(s).standard_normal(n, np.float32) for s, n in ((5, (40, 256)), (4, (300, 256))))
        w = quantise(jnp.asarray(w), "int4")
        y = quantised_matmul(jnp.asarray(x), w.packed, w.scale, int8_activations=True)
        print(hashlib.sha256(np.asarray(y).tobytes()).hexdigest())
    """)
    assert digest.strip() == hashlib.sha256(np.asarray(many).tobytes()).hexdigest()


@pytest.mark.parametrize("format", FORMATS)
def test_a_bad_row_is_its_own_affair(format: str):
    _, times = weight_of(format, 40, 256)
    x = jnp.asarray(normal(6, 7, 256))
    bad = x.at[0].set(0).at[1, 5].set(jnp.nan).at[2, 70].set(jnp.inf).at[3, 200].set(-jnp.inf).at[4].set(1e-35)
    got = np.asarray(times(bad, 0, int8_activations=True))
    np.testing.assert_array_equal(got[[0, 4]], np.zeros_like(got[[0, 4]]))
    assert np.isnan(got[1:4]).all()
    np.testing.assert_array_equal(got[5:], np.asarray(times(x, 0, int8_activations=True))[5:])


def test_a_huge_element_costs_its_group_only_precision():
    values, times = weight_of("Q4_1", 40, 256)
    x = jnp.asarray(normal(7, 2, 256)).at[0, 9].set(3e35)
    expected = rounded(x) @ values[0].astype(np.float64).T
    got = np.asarray(times(x, 0, int8_activations=True))
    for row in range(2):
        np.testing.assert_allclose(got[row], expected[row], rtol=1e-5, atol=1e-6 * np.abs(expected[row]).max())


def test_the_least_int8_is_multiplied_as_it_is():
    packed, x = jnp.full((32, 64), -128, jnp.int8), jnp.ones((3, 64)).at[1].set(-1)
    got = quantised_matmul(x, packed, jnp.ones(32), int8_activations=True)
    np.testing.assert_array_equal(got, np.outer([-8192, 8192, -8192], np.ones(32, np.float32)))


@pytest.mark.parametrize(("columns", "depth"), [(31, 64), (40, 100)])
def test_shapes_without_an_integer_product_have_the_exact_one(columns: int, depth: int):
    w = quantise(jnp.asarray(normal(8, columns, depth)), "int8")
    x = jnp.asarray(normal(9, 5, depth))
    exact = quantised_matmul(x, w.packed, w.scale)
    np.testing.assert_array_equal(quantised_matmul(x, w.packed, w.scale, int8_activations=True), exact)


@pytest.mark.parametrize("format", ["int8", "int4", "int4_affine"])
def test_experts_have_the_bits_of_their_own_products(format: str):
    stack = quantise(jnp.asarray(normal(10, 2, 4, 40, 128)), format)
    sizes, x = (5, 0, 17, 1), jnp.asarray(normal(11, 25, 128))
    counts = jnp.asarray(sizes, jnp.int32)
    got = quantised_grouped_matmul(x, stack.packed, stack.scale, counts, 1, int8_activations=True)
    for expert, end in enumerate(np.cumsum(sizes)):
        rows = slice(end - sizes[expert], end)
        w = jax.tree.map(lambda leaf, expert=expert: leaf[1, expert], stack)
        alone = quantised_matmul(x[rows], w.packed, w.scale, int8_activations=True)
        np.testing.assert_array_equal(got[rows], alone)
    np.testing.assert_array_equal(got[sum(sizes) :], np.zeros((2, 40), np.float32))

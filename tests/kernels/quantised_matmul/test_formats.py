"""Packing and rounding of the quantised formats."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import quantised_matmul as ops
from pallas_kernels.quantised_matmul import QuantisedTensor, abstract, codecs
from pallas_kernels.quantised_matmul.formats import FORMATS, expand_scale

quantise = functools.partial(jax.jit, static_argnames=("format", "group"))(ops.quantise)
dequantise = jax.jit(ops.dequantise)

SHAPES = {"matrix": (40, 64), "stack": (2, 3, 24, 96), "cut_blocks": (130, 160)}


def weights(shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("format", FORMATS)
def test_quantised_weights_pass_their_own_check_and_match_their_abstract_shape(format, shape):
    t = quantise(weights(shape), format)
    t.check()
    expected = abstract(shape, format)
    assert t.shape == shape
    assert (t.packed.shape, t.packed.dtype) == (expected.packed.shape, expected.packed.dtype)
    assert (t.scale.shape, t.scale.dtype) == (expected.scale.shape, expected.scale.dtype)


@pytest.mark.parametrize("format", FORMATS)
def test_representable_weights_come_back_exactly(format):
    t = quantise(weights((160, 256)), format)
    w = dequantise(t)
    again = quantise(w, format)
    np.testing.assert_allclose(dequantise(again), w, rtol=1e-6)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(FORMATS), st.integers(0, 1000), st.floats(1e-3, 1e3))
def test_rounding_is_within_half_a_step(format, seed, size):
    w = weights((24, 128), seed=seed) * np.float32(size)
    t = quantise(w, format)
    step = {"int8": 1.0, "int4": 1.0, "int4_affine": 1.2, "fp8": 32.0, "fp8_row": 32.0, "mxfp4": 2.0}[format]
    limit = np.asarray(expand_scale(t)) * step * 0.5001
    if format == "mxfp4":
        limit = limit * 2  # a magnitude in (6, 8) of the shared exponent is clipped to 6
    assert (np.abs(np.asarray(dequantise(t)) - w) <= limit).all()


@settings(deadline=None)
@given(st.lists(st.integers(-8, 7), min_size=16, max_size=16))
def test_int4_element_i_is_bits_4i_of_its_word(q):
    words = np.asarray(codecs.pack_int4(np.array(q))).astype(np.uint32)
    expected = [sum((v + 8) << (4 * i) for i, v in enumerate(q[o : o + 8])) for o in (0, 8)]
    assert words.tolist() == expected
    assert np.asarray(codecs.unpack_int4(words.astype(np.int32))).tolist() == q


def test_e2m1_decodes_every_code_as_ml_dtypes_does():
    codes = np.arange(16, dtype=np.uint8)
    expected = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(codecs.e2m1_to_float(jnp.arange(16)), expected)


@settings(deadline=None)
@given(st.lists(st.floats(-8, 8, width=32), min_size=8, max_size=8))
def test_e2m1_rounds_as_ml_dtypes_does(values):
    x = np.array(values, np.float32)
    expected = np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(codecs.unpack_e2m1(codecs.pack_e2m1(x)), expected)


def test_e8m0_decodes_every_exponent_as_ml_dtypes_does():
    codes = np.arange(255, dtype=np.uint8)
    expected = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(codecs.e8m0_to_float(codes), expected)


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_of_zeros_stays_zero(format):
    w = weights((8, 128))
    w[3] = 0
    np.testing.assert_array_equal(dequantise(quantise(w, format))[3], 0)


def test_fp8_scales_may_be_given_per_row():
    t = quantise(weights((256, 256)), "fp8")
    per_row = QuantisedTensor(t.packed[100:200], jnp.repeat(t.scale, 128, axis=0)[100:200], "fp8", 128)
    per_row.check()
    np.testing.assert_array_equal(dequantise(per_row), dequantise(t)[100:200])


def test_a_scale_of_the_wrong_shape_is_refused():
    t = quantise(weights((16, 64)), "int4")
    with pytest.raises(ValueError, match=r"scales of shape \(16, 2\), got \(16, 1\)"):
        QuantisedTensor(t.packed, t.scale[:, :1], "int4", 32).check()


def test_a_packed_array_of_the_wrong_dtype_is_refused():
    t = quantise(weights((16, 64)), "int8")
    with pytest.raises(ValueError, match="stored as int8, got int32"):
        QuantisedTensor(t.packed.astype(jnp.int32), t.scale, "int8", 0).check()


@pytest.mark.parametrize("format", ["int4", "mxfp4"])
def test_a_width_that_no_group_divides_is_refused(format):
    with pytest.raises(ValueError, match="divisible by its group of 32, got 40"):
        quantise(weights((8, 40)), format)


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match="'int3' is unknown: use one of int8"):
        QuantisedTensor(jnp.zeros((2, 2)), jnp.ones(2), "int3", 0).check()

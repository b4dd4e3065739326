"""Decoded blocks are those of the gguf package, bit for bit, for any bytes."""

import ml_dtypes
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Q
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from trillion_infer.core.errors import UnsupportedModelError
from trillion_infer.weights.dequantise import dequantise
from trillion_infer.weights.gguf_types import GGMLType

TYPES = [Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0, Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.Q2_K, Q.Q3_K, Q.IQ4_NL, Q.MXFP4]


def test_types_and_blocks_are_those_of_the_package():
    assert {(t.name, t.value): t.block for t in GGMLType} == {(t.name, t.value): GGML_QUANT_SIZES[t] for t in Q}


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("qtype", TYPES, ids=lambda q: q.name)
@settings(max_examples=10, deadline=None)
@given(rows=st.integers(1, 700), seed=st.integers(0, 1000))
def test_equals_the_package(qtype, rows, seed):
    block, size = GGML_QUANT_SIZES[qtype]
    raw = np.random.default_rng(seed).integers(0, 256, (rows, size), np.uint8)
    expected = dequantize(raw, qtype)
    out = np.empty((rows, block), np.float32)
    dequantise(raw, qtype, out)
    np.testing.assert_array_equal(out, expected.reshape(rows, block))


@pytest.mark.parametrize("qtype", [Q.F32, Q.F16, Q.BF16], ids=lambda q: q.name)
def test_plain_types_are_cast(qtype):
    stored = np.dtype({Q.F32: np.float32, Q.F16: np.float16, Q.BF16: ml_dtypes.bfloat16}[qtype])
    values = np.linspace(-2, 2, 24).astype(stored).reshape(4, 6)
    out = np.empty((4, 6), ml_dtypes.bfloat16)
    dequantise(values.view(np.uint8), qtype, out)
    np.testing.assert_array_equal(out, values.astype(ml_dtypes.bfloat16))


def test_a_type_without_decoder_is_named():
    block, size = GGML_QUANT_SIZES[Q.Q8_K]
    with pytest.raises(UnsupportedModelError, match="Q8_K"):
        dequantise(np.zeros((1, size), np.uint8), Q.Q8_K, np.empty((1, block), np.float32))

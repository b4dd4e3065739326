"""Quantised matrices of `tests/oracle/make_formats.py`, whose values the compressed-tensors package and transformers
confirm, decoded here."""

from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors

from pallas_kernels.quantised_matmul import QuantisedTensor, dequantise, quantised_matmul

GOLDEN = Path(__file__).parents[2] / "oracle" / "golden" / "formats"
DTYPES = {"I32": "<i4", "F32": "<f4", "U8": "u1", "F8_E4M3": "u1", "BF16": ml_dtypes.bfloat16}


def load(name: str) -> tuple[QuantisedTensor, np.ndarray]:
    stored = {}
    for key, entry in safetensors.deserialize((GOLDEN / f"{name}.safetensors").read_bytes()):
        if key == "weight_shape":
            continue
        flat = np.frombuffer(bytes(entry["data"]), DTYPES[entry["dtype"]])
        stored[key] = jnp.asarray(flat.reshape(entry["shape"]))
    if name == "int4_g32":
        t = QuantisedTensor(stored["weight_packed"], stored["weight_scale"], "int4", 32)
    elif name == "fp8_block":
        t = QuantisedTensor(stored["weight"], stored["weight_scale_inv"], "fp8", 128)
    elif name == "mxfp4":
        t = QuantisedTensor(stored["weight_packed"], stored["weight_scale"], "mxfp4", 32)
    else:
        blocks = stored["blocks"]
        t = QuantisedTensor(blocks.reshape(*blocks.shape[:-2], -1), stored["scales"], "mxfp4", 32)
    return t, np.asarray(stored["value"])


NAMES = ["int4_g32", "fp8_block", "mxfp4", "mxfp4_gpt_oss"]


@pytest.mark.parametrize("name", NAMES)
def test_a_published_matrix_decodes_to_the_confirmed_values(name):
    t, value = load(name)
    t.check()
    np.testing.assert_array_equal(dequantise(t), value)


@pytest.mark.parametrize("name", NAMES[:3])
def test_a_product_with_it_is_a_product_with_those_values(name):
    t, value = load(name)
    x = np.random.default_rng(0).normal(size=(3, t.shape[-1])).astype(np.float32)
    np.testing.assert_allclose(quantised_matmul(jnp.asarray(x), t), x @ value.T, rtol=1e-5, atol=1e-4)

"""Arguments that do not fit are refused with a sentence that names both sides."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.backends import UnsupportedError
from pallas_kernels.ragged_paged_attention import pool_shape, ragged_paged_attention

from . import naive
from .harness import ARRAYS

CASE = naive.Case(((3, 1), (20, 1), (5, 9)))


def arguments(**changes):
    batch = naive.build(CASE)
    return [jnp.asarray(changes.get(name, batch[name])) for name in ARRAYS]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q": np.zeros((14, 3, 64), np.float32)}, "3 query heads cannot share 2 KV heads"),
        ({"q": np.zeros((9, 4, 64), np.float32)}, "must agree"),
        ({"kv_pool": np.zeros((2, 9, 16, 6, 1, 64), np.float32)}, "needs 4 rows of 64 or more"),
        ({"kv_pool": np.zeros((2, 9, 16, 4, 1, 64), np.float64)}, None),
        ({"kv_pool": np.zeros((2, 9, 16, 4, 1, 64), np.int32)}, "allowed are float32"),
        ({"kv_lens": np.zeros(3, np.int32)}, "page_table must be [S, B] with S=3"),
        ({"cu_q_lens": np.zeros(4, np.int32)}, "S+1=5 entries"),
        ({"num_seqs": np.zeros(3, np.int32)}, "num_seqs must be"),
        ({"kv_lens": np.zeros(4, np.float32)}, "kv_lens must be int32; got float32"),
    ],
)
def test_shapes_and_dtypes_that_contradict_are_refused(changes, words):
    args = arguments(**changes)
    if words is None:  # float64 becomes float32 on the way in
        assert args[3].dtype == jnp.float32
        return
    with pytest.raises(ValueError) as error:
        ragged_paged_attention(*args, scale=1.0, backend="reference")
    assert words in str(error.value)


@pytest.mark.parametrize(
    "option", [{"window": 0}, {"chunk": 0}, {"soft_cap": 0.0}, {"k_scale": -1.0}, {"max_q_len": 0}]
)
def test_options_out_of_range_are_refused_by_name(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        ragged_paged_attention(*arguments(), scale=1.0, **option)


def test_a_backend_that_cannot_run_says_why():
    with pytest.raises(UnsupportedError, match="tpu: pool rows have 64 lanes"):
        ragged_paged_attention(*arguments(), scale=1.0, backend="tpu")


def test_an_unknown_backend_is_refused_with_the_choices():
    with pytest.raises(ValueError, match="use one of auto, reference, tpu, gpu"):
        ragged_paged_attention(*arguments(), scale=1.0, backend="cuda")


def test_pool_shape_is_packed_and_padded_on_tpu_only():
    assert pool_shape(2, 9, 16, 8, 64, jnp.bfloat16, "tpu") == (2, 9, 16, 8, 2, 128)
    assert pool_shape(2, 9, 16, 8, 64, jnp.int8, "tpu") == (2, 9, 16, 4, 4, 128)
    assert pool_shape(2, 9, 16, 8, 64, jnp.bfloat16, "gpu") == (2, 9, 16, 16, 1, 64)
    with pytest.raises(ValueError, match="do not fill words of 4"):
        pool_shape(2, 9, 16, 1, 64, jnp.int8, "tpu")


@pytest.mark.parametrize(
    ("backend", "shape", "dtype", "table", "words"),
    [
        ("tpu", (2, 9, 16, 2, 2, 128), "float16", (4, 4), "a pool of float16 is not handled"),
        ("tpu", (2, 9, 16, 4, 1, 128), "bfloat16", (4, 4), "a bfloat16 pool needs 2 on TPU"),
        ("tpu", (2, 9, 16, 2, 2, 128), "bfloat16", (512, 4096), "takes 8388608 bytes of scalar memory"),
        ("gpu", (2, 9, 16, 2, 2, 64), "bfloat16", (4, 4), "a pool for GPU has 1"),
        ("gpu", (20, 20000, 16, 4, 1, 128), "int8", (4, 4), "use fewer or more pages"),
    ],
)
def test_each_kernel_refuses_with_a_reason_what_it_cannot_run(backend, shape, dtype, table, words):
    sequences = table[0]
    ints = [(), (sequences,), table, (sequences + 1,), (2,)]
    args = [
        *[jax.ShapeDtypeStruct((16, heads, min(shape[-1], 128)), jnp.bfloat16) for heads in (4, 2, 2)],
        jax.ShapeDtypeStruct(shape, dtype),
        *[jax.ShapeDtypeStruct(ints_shape, jnp.int32) for ints_shape in ints],
    ]
    with pytest.raises(UnsupportedError) as error:
        jax.eval_shape(lambda *args: ragged_paged_attention(*args, scale=1.0, backend=backend), *args)
    assert words in str(error.value)

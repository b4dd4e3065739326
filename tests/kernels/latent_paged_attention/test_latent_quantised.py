"""Latent pools of 8-bit numbers with two scales a slot: exactly the attention over what they stand for."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import latent_cases
import numpy as np
import pytest
from latent_cases import Batch, Case

from pallas_kernels.common.quantised_pool import quantise
from pallas_kernels.latent_paged_attention import latent_paged_attention
from tests.kernels.interpreters import BACKENDS, INTERPRET

CASE = Case(((0, 1), (16, 1), (130, 1), (0, 40), (17, 5)), rank=128, rope=32, width=256, page_size=128)


def stored(rows, case, dtype):
    """Numbers and the two scales `[..., 2]` that stand for float rows (latent, rope, unused lanes)."""
    parts = (rows[..., : case.rank], rows[..., case.rank : case.rank + case.rope])
    (latent, by_latent), (rope, by_rope) = (jax.jit(partial(quantise, dtype=dtype))(jnp.asarray(x)) for x in parts)
    numbers = np.concatenate([np.asarray(latent), np.asarray(rope)], axis=-1)
    unused = [(0, 0)] * (rows.ndim - 1) + [(0, rows.shape[-1] - numbers.shape[-1])]
    return np.pad(numbers, unused), np.stack([np.asarray(by_latent), np.asarray(by_rope)], axis=-1)


def pools(pool, case, dtype):
    numbers, scales = stored(pool, case, dtype)
    return numbers, scales.swapaxes(2, 3).copy()


def dequantised(history, case, dtype):
    numbers, scales = stored(history.astype(np.float32), case, dtype)
    by = np.repeat(scales.astype(np.float64), [case.rank, case.rope], axis=-1)
    return numbers.astype(np.float64) * by


def op_of(backend):
    op = partial(latent_paged_attention, scale=CASE.scale, backend=backend, interpret=INTERPRET.get(backend, False))
    return lambda *args, slots=None: op(*args[:-1], kv_scales=args[-1], slots=slots)


def build(case, dtype):
    batch = latent_cases.build(case)
    numbers, scales = pools(batch.args[4], case, dtype)
    args = [*batch.args[:4], numbers, *batch.args[5:], scales]
    wanted = latent_cases.attend(case, Batch(batch.args, [dequantised(h, case, dtype) for h in batch.histories]))
    return args, wanted, pools(latent_cases.written(case, batch), case, dtype)


def same(got, wanted):
    for have, want in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(have, np.float32), np.asarray(want, np.float32))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_it_is_the_attention_over_the_dequantised_values(dtype, backend):
    args, wanted, written = build(CASE, dtype)
    out, *got = jax.jit(op_of(backend))(*map(jnp.asarray, args))
    np.testing.assert_allclose(out, wanted, atol=1e-5, rtol=1e-5)
    same(got, written)


@pytest.mark.parametrize("backend", BACKENDS)
def test_shards_of_slots_merge_to_the_same(backend, over_shards):
    case = dataclasses.replace(CASE, page_size=512 if backend == "tpu" else 128)
    args, wanted, written = build(case, "int8")
    op = op_of(backend)
    out, got, _ = over_shards(lambda *args: op(*args[:-1], slots=args[-1]), args, {4: 2, 10: 3}, 4)
    np.testing.assert_allclose(out, wanted, atol=1e-5, rtol=1e-5)
    same(got, written)


def test_an_8_bit_pool_without_scales_is_refused():
    args, _, _ = build(CASE, "int8")
    with pytest.raises(ValueError, match="a pool of int8 needs its kv_scales; got None"):
        latent_paged_attention(*args[:-1], scale=1.0)

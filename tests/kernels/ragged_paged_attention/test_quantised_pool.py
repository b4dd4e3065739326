"""Pools of 8-bit numbers with a scale a slot and head: exactly the attention over what they stand for."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.backends import UnsupportedError
from pallas_kernels.common.quantised_pool import quantise
from pallas_kernels.cpu_native import native
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from tests.kernels.interpreters import BACKENDS, INTERPRET

from . import naive
from .harness import ARRAYS, MIXED, SMALL

CASES = {
    "mixed": (naive.Case(SMALL), "int8"),
    "window": (naive.Case(SMALL, options={"window": 20}, sinks=True), "float8_e4m3fn"),
    "soft_cap": (naive.Case(SMALL, heads=8, options={"soft_cap": 3.0}), "int8"),
}


def stored(pool, dtype):
    """The 8-bit pool and scales `[L, P, 2K, p]` that stand for a float one; NaN stays NaN in the scales."""
    numbers, scales = (np.asarray(x) for x in jax.jit(partial(quantise, dtype=dtype))(jnp.asarray(pool)))
    return numbers, scales.reshape(*scales.shape[:3], -1).swapaxes(2, 3).copy()


def build(name, backend, shards=1):
    case, dtype = CASES[name]
    if backend == "tpu":
        case = dataclasses.replace(case, page_size=128 * shards)
    case = dataclasses.replace(case, options={"scale": case.dim**-0.5, **case.options})
    pack, lanes = (4, 128) if backend == "tpu" else (1, case.dim)
    case = dataclasses.replace(case, lanes=lanes)
    batch = naive.build(case)
    expected = dict(batch)
    for key in ("keys", "values"):
        expected[key] = [np.multiply(*(np.asarray(x, np.float64) for x in parted(h, dtype))) for h in batch[key]]
    args = [batch[array] for array in ARRAYS]
    numbers, scales = stored(batch["kv_pool"], dtype)
    shape = (*numbers.shape[:3], numbers.shape[3] // pack, pack, lanes)
    args[3] = numbers.reshape(shape)
    written = stored(naive.written(case, batch), dtype)
    return case, [*args, scales], naive.attend(case, expected), (written[0].reshape(shape), written[1])


def parted(x, dtype):
    numbers, scale = quantise(jnp.asarray(x, jnp.float32), dtype)
    return numbers.astype(jnp.float32), scale[..., None]


def op_of(case, batch_sinks, backend):
    op = partial(
        ragged_paged_attention,
        **case.options,
        sinks=batch_sinks,
        backend=backend,
        interpret=INTERPRET.get(backend, False),
    )
    return lambda *args, slots=None: op(*args[:-1], kv_scales=args[-1], slots=slots)


def same_pool(got, wanted):
    for have, want in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(have, np.float32), np.asarray(want, np.float32))


def sinks_of(case):
    found = naive.build(case)["sinks"]
    return None if found is None else jnp.asarray(found)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_attention_over_the_dequantised_values(name, backend):
    case, args, wanted, written = build(name, backend)
    out, *pools = jax.jit(op_of(case, sinks_of(case), backend))(*map(jnp.asarray, args))
    np.testing.assert_allclose(out, wanted, atol=1e-5, rtol=1e-5)
    same_pool(pools, written)


@pytest.mark.parametrize("backend", BACKENDS)
def test_shards_of_slots_merge_to_the_same(backend, over_shards):
    case, args, wanted, written = build("window", backend, shards=4)
    op = op_of(case, sinks_of(case), backend)
    out, pools, _ = over_shards(lambda *args: op(*args[:-1], slots=args[-1]), args, {3: 2, 9: 3}, 4)
    np.testing.assert_allclose(out, wanted, atol=1e-5, rtol=1e-5)
    same_pool(pools, written)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_token_has_the_same_bits_whole_and_in_chunks(backend):
    if backend == "cpu" and not native().isas:
        pytest.skip(native().reason)
    case = naive.Case(((0, 20),), padded_tokens=0, padded_seqs=0, options={"scale": 0.1})
    batch = naive.build(case)
    numbers, scales = stored(batch["kv_pool"], "int8")
    op = jax.jit(op_of(case, None, backend))
    args = [batch[array] for array in ARRAYS]
    args[3] = numbers
    _, *whole = op(*map(jnp.asarray, args), jnp.asarray(scales))
    pools = [numbers, scales]
    for start, stop in ((0, 7), (7, 20)):
        part = list(args)
        part[:4] = [*(x[start:stop] for x in args[:3]), pools[0]]
        part[5], part[7] = np.array([stop], np.int32), np.array([0, stop - start], np.int32)
        _, *pools = op(*map(jnp.asarray, part), jnp.asarray(pools[1]))
    same_pool(pools, whole)


def test_a_scan_over_layers_holds_no_second_pool_nor_scales():
    batch = naive.build(naive.Case(MIXED, layers=4))
    rest = [jnp.asarray(batch[name]) for name in ARRAYS if name not in ("layer", "kv_pool")]

    def step(pool, scales, q, k, v, *rest):
        def body(carry, layer):
            x, pool, scales = carry
            found = ragged_paged_attention(
                x, k, v, pool, layer, *rest, scale=1.0, kv_scales=scales, backend="reference"
            )
            return found, None

        return jax.lax.scan(body, (q, pool, scales), jnp.arange(pool.shape[0], dtype=jnp.int32))[0]

    shape = batch["kv_pool"].shape[2:]
    pool = jax.ShapeDtypeStruct((32, 4096, *shape), jnp.int8)
    scales = jax.ShapeDtypeStruct((32, 4096, shape[1], shape[0]), jnp.float32)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(pool, scales, *rest).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.02 * np.prod(pool.shape)


def test_pages_whose_scales_would_be_copied_are_refused_on_tpu():
    case, dtype = CASES["mixed"]
    pool = jnp.zeros((2, 9, 16, 1, 4, 128), dtype)
    args = [jnp.asarray(naive.build(case)[array]) for array in ARRAYS]
    args[3] = pool
    with pytest.raises(UnsupportedError, match="pages of 16 slots would be copied; use pages of a multiple of 128"):
        ragged_paged_attention(*args, kv_scales=jnp.zeros((2, 9, 4, 16)), scale=1.0, backend="tpu")


def test_scales_of_both_kinds_at_once_are_refused():
    args = build("mixed", "reference")[1]
    with pytest.raises(ValueError, match=r"k_scale=0.5 and v_scale=None must be None"):
        ragged_paged_attention(*args[:-1], kv_scales=args[-1], scale=1.0, k_scale=0.5)

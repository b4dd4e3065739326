"""The XLA reference against dense attention in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.ragged_paged_attention import ragged_paged_attention

ARRAYS = ("q", "k", "v", "kv_pool", "layer", "kv_lens", "page_table", "cu_q_lens", "num_seqs")
DECODE = ((0, 1), (15, 1), (16, 1), (300, 1))
MIXED = (*DECODE, (0, 40), (17, 5), (100, 130))
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


@functools.cache
def compiled(backend, **options):
    return jax.jit(functools.partial(ragged_paged_attention, backend=backend, **options))


def run(case, backend="reference", **kwargs):
    case = dataclasses.replace(case, options={"scale": case.dim**-0.5, **case.options})
    batch = naive.build(case)
    args = [jnp.asarray(batch[name]) for name in ARRAYS]
    sinks = None if batch["sinks"] is None else jnp.asarray(batch["sinks"])
    out, pool = compiled(backend, **case.options, **kwargs)(*args, sinks=sinks)
    return case, batch, np.asarray(out), np.asarray(pool)


def check(case, backend="reference", **kwargs):
    case, batch, out, pool = run(case, backend, **kwargs)
    expected = naive.attend(case, batch)
    tolerance = TOLERANCE[case.q_dtype]
    np.testing.assert_allclose(out.astype(np.float64), expected, atol=tolerance, rtol=tolerance)
    expected = naive.written(case, batch)
    np.testing.assert_array_equal(pool.astype(np.float32), expected.astype(np.float32))


CASES = {
    "decode": naive.Case(DECODE),
    "mixed": naive.Case(MIXED),
    "prefill": naive.Case(((0, 200),), padded_tokens=0, padded_seqs=0),
    "verification": naive.Case(((5, 1), (40, 4), (31, 8), (0, 2))),
    "multi_query": naive.Case(MIXED, heads=8, kv_heads=1),
    "no_groups": naive.Case(MIXED, heads=3, kv_heads=3, dim=80),
    "wide_heads": naive.Case(MIXED, dim=256, page_size=32),
    "window": naive.Case(MIXED, options={"window": 20}),
    "window_of_one": naive.Case(MIXED, options={"window": 1}),
    "chunk": naive.Case(MIXED, options={"chunk": 32}),
    "soft_cap": naive.Case(MIXED, options={"soft_cap": 3.0}),
    "sinks": naive.Case(MIXED, sinks=True, options={"window": 128}),
    "bfloat16": naive.Case(MIXED, q_dtype="bfloat16", pool_dtype="bfloat16", pack=2),
    "int8": naive.Case(MIXED, pool_dtype="int8", pack=4, options={"k_scale": 0.03, "v_scale": 0.04}),
    "fp8": naive.Case(MIXED, pool_dtype="float8_e4m3fn", pack=4, options={"k_scale": 0.5, "v_scale": 2.0}),
    "fp8_plain": naive.Case(MIXED, pool_dtype="float8_e4m3fn", pack=4),
    "pages_of_256": naive.Case(MIXED, page_size=256),
    "nothing": naive.Case((), padded_tokens=8, padded_seqs=4),
}


@pytest.mark.parametrize("name", CASES)
def test_output_and_pool_match_dense_attention(name):
    check(CASES[name])


sequence = st.tuples(st.integers(0, 70), st.integers(0, 20))


@settings(max_examples=20, deadline=None)
@given(
    decode=st.lists(st.integers(0, 70), max_size=3),
    rest=st.lists(sequence, max_size=3),
    shape=st.sampled_from([(4, {"window": 7}), (16, {}), (16, {"chunk": 24})]),
    seed=st.integers(0, 99),
)
def test_any_ragged_batch_matches_dense_attention(decode, rest, shape, seed):
    page_size, limit = shape
    lens = tuple((cached, 1) for cached in decode) + tuple(rest)
    total = sum(extend for _, extend in lens)
    check(
        naive.Case(
            lens,
            dim=8,
            page_size=page_size,
            padded_tokens=64 - total,
            padded_seqs=6 - len(lens),
            blocks=90 // page_size + 2,
            pages=6 * (90 // page_size + 2),
            options=limit,
            seed=seed,
        )
    )


def layers_over(case):
    """A function that runs the op in a scan over the layers of one pool, and its arguments."""
    batch = naive.build(case)
    args = [jnp.asarray(batch[name]) for name in ARRAYS if name not in ("layer", "kv_pool")]

    def step(pool, q, k, v, *rest):
        def body(carry, layer):
            x, pool = carry
            x, pool = ragged_paged_attention(x, k, v, pool, layer, *rest, scale=1.0, backend="reference")
            return (x, pool), None

        (x, pool), _ = jax.lax.scan(body, (q, pool), jnp.arange(pool.shape[0], dtype=jnp.int32))
        return x, pool

    return step, jnp.asarray(batch["kv_pool"]), args


@pytest.mark.parametrize("lens", [DECODE, MIXED], ids=["decode", "mixed"])
def test_a_scan_over_layers_holds_no_second_pool(lens):
    step, pool, args = layers_over(naive.Case(lens, layers=4))
    pool = jax.ShapeDtypeStruct((32, 4096, *pool.shape[2:]), pool.dtype)
    compiled = jax.jit(step, donate_argnums=0).lower(pool, *args).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.02 * np.prod(pool.shape) * 4
    shape = ",".join(map(str, pool.shape))
    copies = [line for line in compiled.as_text().splitlines() if " copy(" in line and f"[{shape}]" in line]
    assert not copies

"""Runs the op on a case and compares it with dense attention; the cases that every backend is tried on."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from pallas_kernels.ragged_paged_attention import ragged_paged_attention

from . import naive

ARRAYS = ("q", "k", "v", "kv_pool", "layer", "kv_lens", "page_table", "cu_q_lens", "num_seqs")
DECODE = ((0, 1), (15, 1), (16, 1), (300, 1))
MIXED = (*DECODE, (0, 40), (17, 5), (100, 130))
SMALL = ((0, 1), (15, 1), (16, 1), (40, 1), (0, 20), (17, 5))
LONG = ((2100, 1), (1030, 3))
KERNEL_CASES = (
    "decode",
    "mixed",
    "multi_query",
    "no_groups",
    "wide_heads",
    "window",
    "chunk",
    "soft_cap",
    "sinks",
    "bfloat16",
    "int8",
    "fp8",
)
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


@st.composite
def ragged_cases(draw, **changes):
    """Any batch of up to six sequences and 64 tokens, of few shapes, so that few programs compile."""
    page_size, limit = draw(st.sampled_from([(4, {"window": 7}), (16, {}), (16, {"chunk": 24})]))
    decode = draw(st.lists(st.integers(0, 70), max_size=3))
    rest = draw(st.lists(st.tuples(st.integers(0, 70), st.integers(0, 20)), max_size=3))
    lens = (*((cached, 1) for cached in decode), *rest)
    blocks = 90 // page_size + 2
    case = naive.Case(
        lens,
        dim=8,
        page_size=page_size,
        padded_tokens=64 - sum(extend for _, extend in lens),
        padded_seqs=6 - len(lens),
        blocks=blocks,
        pages=6 * blocks,
        options=limit,
        seed=draw(st.integers(0, 99)),
    )
    return dataclasses.replace(case, **changes)

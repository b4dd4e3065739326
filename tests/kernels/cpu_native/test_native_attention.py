import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_modules import load_module

from pallas_kernels.cpu_native import native
from pallas_kernels.cpu_native.attention import ragged_paged_attention

pytestmark = pytest.mark.skipif(not native().isas, reason=native().reason)


naive = load_module("ragged_paged_attention/naive.py")
ARRAYS = ("q", "k", "v", "kv_pool", "layer", "kv_lens", "page_table", "cu_q_lens", "num_seqs")
DECODE = ((0, 1), (15, 1), (16, 1), (300, 1))
MIXED = (*DECODE, (0, 40), (17, 5), (100, 130))
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


def run(case, isa="auto", **changes):
    case = dataclasses.replace(case, options={"scale": case.dim**-0.5, **case.options})
    batch = {**naive.build(case), **changes}
    sinks = None if batch["sinks"] is None else jnp.asarray(batch["sinks"])
    args = [jnp.asarray(batch[name]) for name in ARRAYS]
    out, pool = jax.jit(lambda *args: ragged_paged_attention(*args, **case.options, sinks=sinks, isa=isa))(*args)
    return case, batch, np.asarray(out), np.asarray(pool)


def check(case, isa="auto"):
    case, batch, out, pool = run(case, isa)
    tolerance = TOLERANCE[case.q_dtype]
    np.testing.assert_allclose(out.astype(np.float64), naive.attend(case, batch), atol=tolerance, rtol=tolerance)
    np.testing.assert_array_equal(pool.astype(np.float32), naive.written(case, batch).astype(np.float32))


CASES = {
    "decode": naive.Case(DECODE),
    "mixed": naive.Case(MIXED),
    "long": naive.Case(((1000, 1), (900, 70))),
    "prefill": naive.Case(((0, 600),), padded_tokens=0, padded_seqs=0),
    "verification": naive.Case(((5, 1), (40, 4), (31, 8), (0, 2))),
    "multi_query": naive.Case(MIXED, heads=8, kv_heads=1),
    "more_heads_than_rows": naive.Case(MIXED, heads=100, kv_heads=1, dim=16),
    "no_groups": naive.Case(MIXED, heads=3, kv_heads=3, dim=80),
    "wide_heads": naive.Case(MIXED, dim=256, page_size=32),
    "odd_dim": naive.Case(MIXED, dim=20),
    "window": naive.Case(MIXED, options={"window": 20}),
    "window_of_one": naive.Case(MIXED, options={"window": 1}),
    "chunk": naive.Case(MIXED, options={"chunk": 32}),
    "soft_cap": naive.Case(MIXED, options={"soft_cap": 3.0}),
    "sinks": naive.Case(MIXED, sinks=True, options={"window": 128}),
    "bfloat16": naive.Case(MIXED, q_dtype="bfloat16", pool_dtype="bfloat16"),
    "float16": naive.Case(MIXED, pool_dtype="float16", dim=20),
    "int8": naive.Case(MIXED, pool_dtype="int8", options={"k_scale": 0.03125, "v_scale": 0.0625}),
    "fp8": naive.Case(MIXED, pool_dtype="float8_e4m3fn", options={"k_scale": 0.5, "v_scale": 2.0}),
    "fp8_e5m2": naive.Case(MIXED, pool_dtype="float8_e5m2"),
    "pages_of_256": naive.Case(MIXED, page_size=256),
    "nothing": naive.Case((), padded_tokens=8, padded_seqs=4),
}


@pytest.mark.parametrize("isa", native().isas)
@pytest.mark.parametrize("name", CASES)
def test_output_and_pool_match_dense_attention(name, isa):
    check(CASES[name], isa)


sequence = st.tuples(st.integers(0, 70) | st.integers(200, 300), st.integers(0, 20))


@settings(max_examples=40, deadline=None)
@given(
    decode=st.lists(st.integers(0, 70) | st.integers(200, 600), max_size=3),
    rest=st.lists(sequence, max_size=3),
    page_size=st.sampled_from([1, 4, 16]),
    window=st.none() | st.integers(1, 40),
    chunk=st.none() | st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_any_ragged_batch_matches_dense_attention(decode, rest, page_size, window, chunk, seed):
    lens = tuple((cached, 1) for cached in decode) + tuple(rest)
    total = sum(extend for _, extend in lens)
    options = {"window": window, "chunk": chunk}
    blocks = 602 // page_size + 2
    check(
        naive.Case(
            lens,
            dim=8,
            page_size=page_size,
            padded_tokens=64 - total,
            padded_seqs=6 - len(lens),
            blocks=blocks,
            pages=6 * blocks,
            options=options,
            seed=seed,
        )
    )


@pytest.mark.parametrize("options", [{}, {"window": 100}, {"chunk": 64}], ids=["full", "window", "chunk"])
def test_a_token_has_the_same_bits_in_a_prompt_a_chunk_and_a_decode_step(options):
    case = naive.Case(((0, 500),), padded_tokens=0, padded_seqs=0, options=options)
    case, batch, whole, pool = run(case)
    for first, stop in ((0, 100), (100, 101), (101, 104), (300, 500), (499, 500)):
        tokens = slice(first, stop)
        part = {
            "q": batch["q"][tokens],
            "k": batch["k"][tokens],
            "v": batch["v"][tokens],
            "kv_pool": pool,
            "kv_lens": np.array([stop], np.int32),
            "cu_q_lens": np.array([0, stop - first], np.int32),
            "num_seqs": np.array([int(stop - first == 1), 1], np.int32),
        }
        _, _, out, _ = run(case, **part)
        np.testing.assert_array_equal(out, whole[tokens])


def test_a_sequence_has_the_same_bits_alone_and_in_a_batch():
    case, batch, whole, pool = run(naive.Case(MIXED, q_dtype="bfloat16", pool_dtype="bfloat16"))
    for s in range(len(MIXED)):
        tokens = slice(batch["cu_q_lens"][s], batch["cu_q_lens"][s + 1])
        part = {
            **{name: batch[name][tokens] for name in ("q", "k", "v")},
            "kv_pool": pool,
            "kv_lens": batch["kv_lens"][s : s + 1],
            "page_table": batch["page_table"][s : s + 1],
            "cu_q_lens": np.array([0, tokens.stop - tokens.start], np.int32),
            "num_seqs": np.array([0, 1], np.int32),
        }
        _, _, out, _ = run(case, **part)
        np.testing.assert_array_equal(out, whole[tokens])


def test_a_scan_over_layers_holds_no_second_pool():
    batch = naive.build(naive.Case(MIXED, layers=4))
    rest = [jnp.asarray(batch[name]) for name in ARRAYS if name not in ("layer", "kv_pool")]

    def step(pool, q, k, v, *rest):
        def body(carry, layer):
            x, pool = carry
            return ragged_paged_attention(x, k, v, pool, layer, *rest, scale=1.0), None

        (x, pool), _ = jax.lax.scan(body, (q, pool), jnp.arange(pool.shape[0], dtype=jnp.int32))
        return x, pool

    pool = jax.ShapeDtypeStruct((32, 4096, *batch["kv_pool"].shape[2:]), jnp.float32)
    compiled = jax.jit(step, donate_argnums=0).lower(pool, *rest).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.02 * np.prod(pool.shape) * 4
    shape = ",".join(map(str, pool.shape))
    assert not [line for line in compiled.as_text().splitlines() if " copy(" in line and f"[{shape}]" in line]


BAD = {
    "page": ({"page_table": np.full((2, 3), 99, np.int32)}, "page 99 of block 0 of sequence 0 is outside"),
    "negative_page": ({"page_table": np.full((2, 3), -1, np.int32)}, "page -1 of block 0"),
    "kv_len": ({"kv_lens": np.array([99, 0], np.int32)}, "kv_len 99 of sequence 0"),
    "short_kv_len": ({"kv_lens": np.array([1, 0], np.int32)}, "kv_len 1 of sequence 0"),
    "cu_q_lens": ({"cu_q_lens": np.array([0, 50, 50], np.int32)}, "cu_q_lens of sequence 0"),
    "num_seqs": ({"num_seqs": np.array([0, 3], np.int32)}, "num_seqs says 3 sequences"),
    "layer": ({"layer": np.int32(2)}, r"layer 2 is outside \[0, 2\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_values_out_of_range_are_an_error_not_a_crash(name):
    changes, message = BAD[name]
    with pytest.raises(Exception, match=message):
        run(naive.Case(((20, 5),), dim=16), **changes)


def test_a_dtype_without_kernels_is_refused():
    with pytest.raises(NotImplementedError, match="got q float16 and pool float32"):
        run(naive.Case(DECODE, q_dtype="float16"))

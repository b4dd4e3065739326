"""The XLA reference of latent attention against dense attention in float64."""

import functools

import jax
import jax.numpy as jnp
import latent_cases
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from latent_cases import Case

from pallas_kernels.latent_paged_attention import latent_paged_attention

DECODE = ((0, 1), (15, 1), (16, 1), (300, 1))
MIXED = (*DECODE, (0, 40), (17, 5), (100, 130), (20, 0), (3, 2))
CASES = {
    "decode": Case(DECODE),
    "many_decodes": Case(tuple((3 * i, 1) for i in range(21))),
    "mixed": Case(MIXED),
    "padded_lanes": Case(MIXED, width=64),
    "prefill": Case(((0, 200),), padded_tokens=0, padded_seqs=0),
    "verification": Case(((5, 1), (40, 4), (31, 8), (0, 2))),
    "large_pages": Case(MIXED, page_size=256),
    "bfloat16": Case(MIXED, dtype="bfloat16"),
    "nothing": Case((), padded_tokens=8, padded_seqs=4),
}
reference = jax.jit(functools.partial(latent_paged_attention, backend="reference"), static_argnames="scale")


@pytest.mark.parametrize("name", CASES)
def test_it_equals_dense_attention(name):
    latent_cases.check(CASES[name], reference)


lengths = st.tuples(st.integers(0, 70), st.integers(0, 40))


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.integers(0, 70), max_size=3),
    st.lists(lengths, max_size=3),
    st.sampled_from([8, 16]),
    st.integers(0, 9),
)
def test_any_ragged_batch_equals_dense_attention(decodes, rest, page_size, seed):
    lens = (*((cached, 1) for cached in decodes), *rest)
    padded = 128 - sum(extend for _, extend in lens)
    case = Case(lens, page_size=page_size, padded_tokens=padded, padded_seqs=7 - len(lens), blocks=16, seed=seed)
    latent_cases.check(case, reference)


def test_a_program_for_decode_alone_gives_the_same_output():
    case = CASES["decode"]
    batch = latent_cases.build(case)
    args = map(jnp.asarray, batch.args)
    out, _ = latent_paged_attention(*args, scale=case.scale, max_q_len=1, backend="reference")
    np.testing.assert_allclose(out, latent_cases.attend(case, batch), atol=1e-5)


def test_a_scan_over_layers_holds_no_second_pool():
    case = Case(DECODE, layers=4, rank=512, rope=64, width=576)
    args = list(latent_cases.build(case).args)
    pool = jax.ShapeDtypeStruct((4, 16384, 16, 576), jnp.float32)

    def steps(pool, q_latent, q_rope, latent, k_rope, *batch):
        def body(carry, layer):
            out, pool = carry
            out, pool = latent_paged_attention(
                q_latent, q_rope, latent + out[:, 0], k_rope, pool, layer, *batch, scale=0.1, backend="reference"
            )
            return (out, pool), None

        return jax.lax.scan(body, (jnp.zeros_like(q_latent), pool), jnp.arange(4))[0]

    compiled = jax.jit(steps, donate_argnums=0).lower(pool, *args[:4], *args[6:]).compile()
    pool_bytes = pool.size * pool.dtype.itemsize
    assert compiled.memory_analysis().temp_size_in_bytes < 0.02 * pool_bytes


WRONG = {
    "q_rope": (1, (7, 4, 15), "q_latent"),
    "latent": (2, (7, 31), "latent must be"),
    "pool": (4, (2, 9, 16, 47), "R >= 48"),
    "page_table": (7, (4, 2), "S=5"),
    "cu_q_lens": (8, (5,), r"S\+1=6"),
    "num_seqs": (9, (3,), "num_seqs"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_shape_is_refused_with_both_sides_named(name):
    position, shape, message = WRONG[name]
    args = list(latent_cases.build(Case(DECODE)).args)
    args[position] = np.zeros(shape if name != "q_rope" else (6, 4, 16), args[position].dtype)
    with pytest.raises(ValueError, match=message):
        latent_paged_attention(*args, scale=1.0)


def test_lengths_must_be_int32():
    args = list(latent_cases.build(Case(DECODE)).args)
    args[6] = args[6].astype(np.float32)
    with pytest.raises(ValueError, match="kv_lens must be int32; got float32"):
        latent_paged_attention(*args, scale=1.0)

"""The XLA reference against dense attention in float64, and its use of memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from pallas_kernels.ragged_paged_attention import ragged_paged_attention

from . import naive
from .harness import ARRAYS, CASES, DECODE, MIXED, check, ragged_cases


@pytest.mark.parametrize("name", CASES)
def test_output_and_pool_match_dense_attention(name):
    check(CASES[name])


@settings(max_examples=20, deadline=None)
@given(ragged_cases())
def test_any_ragged_batch_matches_dense_attention(case):
    check(case)


def test_a_promise_of_single_queries_changes_no_decode_output():
    check(CASES["decode"], max_q_len=1)


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

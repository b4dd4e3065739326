"""The Triton kernels of the expert matmuls in interpret mode, unused experts and padded rows poisoned."""

import functools

import expert_cases
import jax
import pytest
from expert_cases import Case
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped_matmul import grouped_ffn, slices

STATIC = ("activation", "scores_on_input")
interpreted = jax.jit(functools.partial(grouped_ffn, backend="gpu", interpret=True), static_argnames=STATIC)
CASES = {
    "one_token": Case(tokens=1, model=128),
    "many_blocks": Case(tokens=70, experts=3, model=128, ffn=200),
    "top_one": Case(choices=1, scores_on_input=True),
    "all_padding": Case(padded_tokens=9),
    "gelu": Case(activation="gelu_tanh"),
    "int8": Case(format="int8", layers=2, biases=True),
    "fp8_row": Case(format="fp8_row", layers=2, biases=True),
    "int4": Case(format="int4", layers=2),
    "fp8": Case(format="fp8", layers=2, model=160, ffn=300),
    "mxfp4": Case(format="mxfp4", layers=2, activation="clamped_swiglu", biases=True),
    "bfloat16": Case(dtype="bfloat16", layers=2, padded_tokens=2),
    "bfloat16_int4_affine": Case(dtype="bfloat16", format="int4_affine"),
}


@pytest.mark.parametrize("name", CASES)
def test_it_equals_a_loop_over_tokens(name):
    expert_cases.check(CASES[name], interpreted)


@pytest.mark.parametrize("name", expert_cases.SLICED)
def test_slices_equal_a_loop_over_tokens(monkeypatch, name):
    monkeypatch.setattr(slices, "SLICE_BYTES", 32 << 10)
    run = functools.partial(grouped_ffn, backend="gpu", interpret=True)
    expert_cases.check(expert_cases.SLICED[name], jax.jit(run, static_argnames=STATIC))


@settings(max_examples=3, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 23), st.sets(st.integers(0, 7), max_size=5))
def test_any_routing_equals_a_loop_over_tokens(seed, padded, poisoned):
    case = Case(tokens=24, choices=3, experts=8, seed=seed, padded_tokens=padded, poisoned=tuple(poisoned))
    expert_cases.check(case, interpreted)

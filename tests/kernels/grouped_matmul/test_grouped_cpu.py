"""The native backend of the expert matmuls, unused experts and padded rows poisoned."""

import functools

import expert_cases
import jax
import pytest
from expert_cases import Case

from pallas_kernels.cpu_native import native
from pallas_kernels.grouped_matmul import grouped_ffn

pytestmark = pytest.mark.skipif(not native().isas, reason=native().reason or "native kernels are here")
run = jax.jit(functools.partial(grouped_ffn, backend="cpu"), static_argnames=("activation", "scores_on_input"))
CASES = {
    "mixed": Case(layers=2),
    "top_one": Case(choices=1, scores_on_input=True),
    "all_padding": Case(padded_tokens=9),
    "biases": Case(activation="clamped_swiglu", biases=True, layers=2),
    "int8": Case(format="int8", layers=2, biases=True),
    "fp8_row": Case(format="fp8_row", layers=2, biases=True),
    "int4": Case(format="int4_affine"),
    "bfloat16": Case(dtype="bfloat16", layers=3),
}


@pytest.mark.parametrize("name", CASES)
def test_it_equals_a_loop_over_tokens(name):
    expert_cases.check(CASES[name], run)

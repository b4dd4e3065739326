"""The Mosaic kernel in interpret mode, with its race detector, against dense attention in float64."""

import dataclasses

import pytest
from hypothesis import given, settings

from tests.kernels.interpreters import INTERPRET

from . import naive
from .harness import CASES, KERNEL_CASES, LONG, SMALL, check, ragged_cases


@pytest.mark.parametrize("name", KERNEL_CASES)
def test_output_and_pool_match_dense_attention(name):
    case = CASES[name]
    lanes = -(-case.dim // 128) * 128
    check(dataclasses.replace(case, lens=SMALL, lanes=lanes), "tpu", interpret=INTERPRET["tpu"])


def test_a_context_of_several_chunks_matches_dense_attention():
    check(naive.Case(LONG, heads=2, kv_heads=1, dim=128, page_size=128), "tpu", interpret=INTERPRET["tpu"])


@settings(max_examples=4, deadline=None)
@given(ragged_cases(lanes=128))
def test_any_ragged_batch_matches_dense_attention(case):
    check(case, "tpu", interpret=INTERPRET["tpu"])

"""The Triton kernels in interpret mode against dense attention in float64."""

import dataclasses

import pytest
from hypothesis import given, settings

from . import naive
from .harness import CASES, KERNEL_CASES, LONG, SMALL, check, ragged_cases


@pytest.mark.parametrize("name", KERNEL_CASES)
def test_output_and_pool_match_dense_attention(name):
    check(dataclasses.replace(CASES[name], lens=SMALL, pack=1), "gpu", interpret=True)


def test_a_context_of_several_steps_matches_dense_attention():
    check(naive.Case(LONG, heads=2, kv_heads=1, dim=128, page_size=128), "gpu", interpret=True)


@settings(max_examples=6, deadline=None)
@given(ragged_cases())
def test_any_ragged_batch_matches_dense_attention(case):
    check(case, "gpu", interpret=True)

"""The Triton kernels in interpret mode against dense attention in float64."""

import dataclasses

import pytest
from hypothesis import given, settings

from .harness import CASES, KERNEL_CASES, SMALL, check, ragged_cases


@pytest.mark.parametrize("name", KERNEL_CASES)
def test_output_and_pool_match_dense_attention(name):
    check(dataclasses.replace(CASES[name], lens=SMALL, pack=1), "gpu", interpret=True)


@settings(max_examples=6, deadline=None)
@given(ragged_cases())
def test_any_ragged_batch_matches_dense_attention(case):
    check(case, "gpu", interpret=True)

"""The Triton kernels in interpret mode against dense attention in float64."""

import dataclasses

import pytest
from test_reference import CASES, check

NAMES = ("decode", "mixed", "verification", "window", "chunk", "soft_cap", "sinks", "bfloat16", "int8", "fp8")


SMALL = ((0, 1), (15, 1), (16, 1), (40, 1), (0, 20), (17, 5))


@pytest.mark.parametrize("name", NAMES)
def test_output_and_pool_match_dense_attention(name):
    check(dataclasses.replace(CASES[name], lens=SMALL, pack=1), "gpu", interpret=True)

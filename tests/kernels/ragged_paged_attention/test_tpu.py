"""The Mosaic kernel in interpret mode, with its race detector, against dense attention in float64."""

import dataclasses

import pytest
from test_reference import CASES, check

NAMES = ("decode", "mixed", "verification", "window", "chunk", "soft_cap", "sinks", "bfloat16", "int8", "fp8")


def on_tpu(case):
    """The case with a pool laid out as the kernel wants it."""
    return dataclasses.replace(case, lanes=-(-case.dim // 128) * 128)


SMALL = ((0, 1), (15, 1), (16, 1), (40, 1), (0, 20), (17, 5))


@pytest.mark.parametrize("name", NAMES)
def test_output_and_pool_match_dense_attention(name):
    check(on_tpu(dataclasses.replace(CASES[name], lens=SMALL)), "tpu", interpret=True)

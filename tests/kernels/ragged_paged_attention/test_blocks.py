"""Block sizes fit on the chip for every real shape, and measured ones win."""

import json
from dataclasses import asdict

import pytest

from pallas_kernels.common import tuning
from pallas_kernels.ragged_paged_attention import blocks
from pallas_kernels.ragged_paged_attention.arg_specs import SPECS


def shape_of(spec, lanes):
    return blocks.Shape(spec.heads, spec.kv_heads, lanes, spec.page_size, spec.pool_dtype)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_heuristic_blocks_fit_vector_and_shared_memory(spec):
    tpu = shape_of(spec, -(-spec.dim // 128) * 128)
    gpu = shape_of(spec, spec.dim)
    assert blocks.tpu_blocks(tpu, spec.max_len // spec.page_size, 512).refusal(tpu) is None
    assert blocks.gpu_blocks(gpu).refusal(gpu) is None


def test_blocks_that_are_too_large_are_refused_with_both_sizes():
    shape = blocks.Shape(64, 8, 128, 64, "bfloat16")
    reason = blocks.TpuBlocks(block_q=4096, pages=64).refusal(shape)
    assert reason.endswith(f"of which {blocks.VECTOR_LIMIT} may be used.")
    reason = blocks.GpuBlocks(keys=1024, rows=64, warps=4, stages=2).refusal(shape)
    assert reason.endswith(f"of which {blocks.SHARED_BUDGET} may be used.")


def test_a_measured_entry_wins_over_the_heuristic(monkeypatch):
    shape = blocks.Shape(32, 8, 128, 64, "bfloat16")
    entry = {"shape": {"device": "v5e", **asdict(shape)}, "blocks": {"block_q": 8, "pages": 3}}
    monkeypatch.setattr(tuning, "_entries", lambda *_: json.loads(json.dumps([entry])))
    monkeypatch.setattr(blocks, "device_name", lambda: "v5e")
    assert blocks.tpu_blocks(shape, 100, 512) == blocks.TpuBlocks(block_q=8, pages=3)
    monkeypatch.setattr(blocks, "device_name", lambda: "v6e")
    assert blocks.tpu_blocks(shape, 100, 512) != blocks.TpuBlocks(block_q=8, pages=3)

"""Block sizes of latent attention fit on the chip for every real shape, and measured ones win."""

import json
from dataclasses import asdict

import latent_cases
import numpy as np
import pytest
from latent_cases import Case

from pallas_kernels.common import tuning
from pallas_kernels.common.backends import UnsupportedError
from pallas_kernels.latent_paged_attention import blocks, tpu
from pallas_kernels.latent_paged_attention.arg_specs import SPECS


def shape_of(spec, width):
    return blocks.Shape(spec.heads, spec.rank, width, spec.page_size // spec.shards, spec.pool_dtype)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_heuristic_blocks_fit_vector_and_shared_memory(spec):
    on_tpu, on_gpu = shape_of(spec, 640), shape_of(spec, 576)
    assert blocks.tpu_blocks(on_tpu, spec.max_len // spec.page_size).refusal(on_tpu) is None
    assert blocks.gpu_blocks(on_gpu).refusal(on_gpu) is None


def test_blocks_that_are_too_large_are_refused_with_both_sizes():
    shape = blocks.Shape(64, 512, 640, 64, "bfloat16")
    reason = blocks.TpuBlocks(rows=4096, pages=64).refusal(shape)
    assert reason.endswith(f"of which {blocks.VECTOR_LIMIT} may be used.")
    reason = blocks.GpuBlocks(rows=128, keys=128, warps=8, stages=3).refusal(shape)
    assert reason.endswith(f"of which {blocks.SHARED_LIMIT} may be used.")


def test_a_kernel_refuses_blocks_that_do_not_fit_before_it_is_launched():
    batch = latent_cases.build(Case(((3, 1),), rank=128, rope=32, width=256))
    args = [np.asarray(a) for a in (*batch.args[:2], *batch.args[4:])]
    with pytest.raises(UnsupportedError, match=r"latent_paged_attention: TpuBlocks\(rows=65536, pages=4096\) needs"):
        tpu.attend(*args, scale=1.0, max_q_len=1, blocks=blocks.TpuBlocks(65536, 4096))


def test_a_measured_entry_wins_over_the_heuristic(monkeypatch):
    shape = blocks.Shape(64, 512, 640, 64, "bfloat16")
    entry = {"shape": {"device": "v5e", **asdict(shape)}, "blocks": {"rows": 128, "pages": 3}}
    monkeypatch.setattr(tuning, "_entries", lambda *_: json.loads(json.dumps([entry])))
    monkeypatch.setattr(blocks, "device_name", lambda: "v5e")
    assert blocks.tpu_blocks(shape, 100) == blocks.TpuBlocks(rows=128, pages=3)
    monkeypatch.setattr(blocks, "device_name", lambda: "v6e")
    assert blocks.tpu_blocks(shape, 100) != blocks.TpuBlocks(rows=128, pages=3)

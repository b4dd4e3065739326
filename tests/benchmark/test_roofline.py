"""Costs of a step by the model's numbers, and the GPU benchmark as a user runs it, on tiny models."""

import json
import subprocess
import sys

import pytest

from configs.qwen3_30b_a3b_v5e_8 import HF_CONFIG as QWEN3
from tests.environment import ROOT, environment
from trillion_infer.benchmark.roofline import LLAMA3_8B, Costs
from trillion_infer.models import read_family


def costs(config) -> Costs:
    return Costs.of(read_family(config).config, 2)


def test_llama3_8b_reads_its_weights_once_a_step():
    """8.03 billion parameters less the embedding's 0.525, of which a step reads a row a token; norms are left out."""
    assert costs(LLAMA3_8B).decode_bytes(1, 0) == pytest.approx(2 * (8.03e9 - 0.525e9), rel=0.002)


def test_a_token_of_llama3_8b_costs_two_flops_a_parameter():
    found = costs(LLAMA3_8B)
    assert found.token_flops + found.head_flops == pytest.approx(found.decode_bytes(1, 0))


def test_qwen3_30b_a3b_has_its_three_billion_active_parameters():
    """3.3 billion active, 0.31 of them the embedding's row table."""
    assert costs(QWEN3).token_flops / 2 + costs(QWEN3).head_flops / 2 == pytest.approx(3.0e9, rel=0.05)


def test_more_tokens_choose_more_experts_up_to_all():
    found = costs(QWEN3)
    sizes = [found.decode_bytes(running, 0) for running in (1, 8, 64, 10_000)]
    assert sizes == sorted(sizes)
    assert sizes[0] - found.dense_bytes == pytest.approx(8 * found.expert_bytes)
    assert sizes[-1] - found.dense_bytes == pytest.approx(128 * found.expert_bytes)


def test_context_costs_its_kv():
    found = costs(LLAMA3_8B)
    kv = 32 * 2 * 8 * 128 * 2
    assert found.decode_bytes(4, 1000) - found.decode_bytes(4, 0) == pytest.approx(4 * 1000 * kv)


def test_the_gpu_script_runs_on_tiny_models():
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--tiny", "--models=qwen3_30b_a3b", "--bundle="]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment(), check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["running"], line["context"]) for line in lines] == [(1, 16), (2, 16)]
    assert all(line["decode_tok_s"] > 0 and line["prefill_tok_s"] > 0 for line in lines)

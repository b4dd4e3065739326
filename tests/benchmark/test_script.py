"""scripts/benchmark.py as a user runs it, on a tiny model with tiny workloads."""

import json
import subprocess
import sys

import jsonschema
import pytest

from tests.environment import ROOT, environment

MODEL = ROOT / "tests" / "oracle" / "golden" / "tiny" / "smollm2"
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["engine", "metric", "value", "unit", "dtype", "model"],
    "properties": {
        "engine": {"enum": ["trillion_infer", "machine"]},
        "metric": {"type": "string"},
        "value": {"type": "number", "exclusiveMinimum": 0},
        "unit": {"enum": ["tokens/s", "s", "ms", "MB", "GB/s", "GFLOP/s"]},
        "dtype": {"enum": ["float32", "bfloat16"]},
        "model": {"const": "smollm2"},
    },
}


def benchmark(*flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "scripts" / "benchmark.py"), f"--model={MODEL}", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment(), check=False)


def tiny(*flags: str) -> subprocess.CompletedProcess:
    sizes = ("--scale=0.05", "--repeats=1", "--dtype=float32", "--max_running=2", "--prefill_chunk=64")
    return benchmark(*sizes, "--torch_python=", *flags)


def test_every_metric_is_one_json_line():
    done = tiny("--workload=all", "--json")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    for line in lines:
        jsonschema.validate(line, SCHEMA)
    assert [line["metric"] for line in lines] == [
        "startup_cold_s",
        "startup_s",
        "serve_out_tok_s",
        "serve_first_token_p50_ms",
        "serve_first_token_p99_ms",
        "serve_token_p50_ms",
        "serve_token_p99_ms",
        "decode_tok_s",
        "prefill_tok_s",
        "offline_out_tok_s",
        "offline_total_tok_s",
        "peak_rss_mb",
        "read_gb_s",
        "bf16_gflops",
        "f32_gflops",
    ]
    assert "transformers is not measured" in done.stderr


def test_without_json_a_table_is_printed():
    done = tiny("--workload=decode")
    assert done.returncode == 0, done.stderr
    assert "decode_tok_s" in done.stdout
    assert "read_gb_s" in done.stdout
    assert "prefill_tok_s" not in done.stdout


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--workload=served", "unknown"),
        ("--repeats=0", "repeats is 0"),
        ("--torch_python=/nowhere/python", "does not run"),
        ("--dtype=int3", "dtype is 'int3'"),
        ("--model=/nowhere/model", "/nowhere/model"),
    ],
)
def test_a_bad_value_ends_with_one_clear_line(flag, says):
    done = benchmark("--workload=decode", "--scale=0.05", flag)
    assert done.returncode != 0
    assert done.stdout == ""
    said = [line for line in done.stderr.splitlines() if line and not line.startswith("notice:")]
    assert len(said) == 1, done.stderr
    assert said[0].startswith("error: ")
    assert says in said[0]


def test_an_unknown_flag_is_refused():
    done = benchmark("--workloads=decode")
    assert done.returncode != 0
    assert "workloads" in done.stderr

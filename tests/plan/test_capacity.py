"""Capacity by arithmetic agrees with what the compiler reports, and with itself."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.plan.test_compile_report import TINY
from tests.plan.test_trace import ROOT
from trillion_infer import ConfigError
from trillion_infer.config.deployment import find_deployment
from trillion_infer.plan.capacity import GIB, plan_capacity
from trillion_infer.plan.compile_report import compile_deployment

pytestmark = pytest.mark.aot


def test_with_the_compilers_temporaries_it_is_the_compile_report():
    report = compile_deployment(TINY, only_largest=True)
    plan = plan_capacity(TINY, temp_gib=report.temp / GIB)
    assert plan.kv_tokens == pytest.approx(report.kv_tokens, rel=0.001)
    assert plan.weights_gib_per_device == pytest.approx(report.weights / GIB, rel=0.05, abs=0.002)
    assert plan.kv_bytes_per_token == pytest.approx(
        2 * 2 * 2 * 128 * 2, rel=0.01
    )  # layers, k and v, heads, width, bytes


def test_temporaries_that_are_not_counted_leave_the_physical_limit():
    """Kimi on eight H100: 71.07 GiB, of which the compiler's temporaries take some."""
    plan = plan_capacity(find_deployment("kimi_k2_5_h100x8"))
    assert plan.temporaries == "not counted"
    assert plan.kv_gib_total == pytest.approx(71.07, abs=0.05)
    assert plan_capacity(find_deployment("kimi_k2_5_h100x8"), temp_gib=0.5).kv_gib_total == pytest.approx(
        67.07, abs=0.05
    )


def test_requests_that_fit_take_what_there_is():
    plan = plan_capacity(find_deployment("qwen3_30b_a3b_v5e_8"), contexts=[40960, 4096])
    assert [each.context for each in plan.contexts] == [4096, 40960]
    for each in plan.contexts:
        assert each.requests * each.kv_gib <= plan.kv_gib_total < (each.requests + 1) * each.kv_gib
        assert each.running == min(each.requests, 64)


def test_a_step_cannot_be_faster_than_reading_its_weights_and_kv():
    plan = plan_capacity(find_deployment("llama4_scout_h200x2"), contexts=[1024, 1048576])
    short, long = plan.contexts
    assert long.running == 1
    kv = long.kv_gib * GIB / plan.devices
    assert long.decode_tok_s <= 4800e9 / kv
    assert short.decode_tok_s > long.decode_tok_s
    assert {short.bound, long.bound} <= {"bandwidth", "arithmetic"}


@pytest.mark.parametrize("context", [0, 10**9])
def test_a_context_beyond_the_model_is_refused(context):
    with pytest.raises(ConfigError, match=f"--contexts has {context}; tiny takes 1 to 256 tokens"):
        plan_capacity(TINY, contexts=[context])


def test_a_bigger_deployment_holds_more():
    wide = replace(TINY, options={**TINY.options, "mesh": "data=2,tensor=2"})
    assert plan_capacity(wide).kv_tokens == pytest.approx(2 * plan_capacity(TINY).kv_tokens, rel=0.02)


def test_the_script_prints_one_object_and_wants_one_kind_of_plan():
    def run(*args):
        command = [sys.executable, str(ROOT / "scripts" / "plan.py"), *args]
        return subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)

    row = json.loads(run("--config=gpt_oss_120b_h100x1", "--json", "--contexts=4096,8192").stdout)
    assert {"kv_gib_total", "kv_tokens", "weights_gib_per_device"} <= set(row)
    assert [each["context"] for each in row["contexts"]] == [4096, 8192]
    for args in ((), ("--config=x", "--trace=y"), ("--config=none",), ("--config=gpt_oss_120b_h100x1", "--contexts=a")):
        failed = run(*args)
        assert failed.returncode == 2
        assert len(failed.stderr.splitlines()) == 1

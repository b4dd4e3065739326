"""Replaying traces through the real index and eviction code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trillion_infer.core.errors import ConfigError
from trillion_infer.plan.trace import BLOCK_TOKENS, TraceRequest, compare, footprint, gap_closed, load_trace, replay

ROOT = Path(__file__).parents[2]
PUBLIC = ROOT.parent / "shared" / "data" / "conversation_trace.jsonl"

prompts = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=20)


def as_trace(paths):
    """Requests whose block names are prefixes, as in a real trace: equal names, equal prefix."""
    names: dict[tuple, int] = {}
    return [
        TraceRequest(
            tuple(names.setdefault(tuple(path[: i + 1]), len(names)) for i in range(len(path))),
            len(path) * BLOCK_TOKENS + 1,
        )
        for path in paths
    ]


@given(prompts)
@settings(deadline=None)
def test_with_memory_for_everything_each_block_is_computed_once(paths):
    trace = as_trace(paths)
    result = replay(trace, footprint(trace) + 1, "lru")
    blocks = sum(len(request.blocks) for request in trace)
    assert result.hit_tokens == (blocks - footprint(trace)) * BLOCK_TOKENS
    assert result.evictions == 0


@given(prompts, st.integers(4, 8), st.sampled_from(["value", "lru"]))
@settings(deadline=None)
def test_no_policy_finds_more_than_infinite_memory(paths, size, policy):
    trace = as_trace(paths)
    assert replay(trace, size, policy).hit_tokens <= replay(trace, footprint(trace) + 4, "lru").hit_tokens


def test_lru_on_a_cycle_larger_than_the_pool_finds_nothing():
    trace = as_trace([[i] for i in range(5)] * 4)
    assert replay(trace, 4, "lru").hit_tokens == 0
    assert replay(trace, 5, "lru").hit_tokens == 15 * BLOCK_TOKENS


def test_blocks_used_again_survive_a_scan_under_the_value_policy():
    scan = [[100 + i] for i in range(40)]
    trace = as_trace([[1], [1], *scan[:5], [1], *scan[5:11], [1], *scan[11:17], [1]])
    assert replay(trace, 6, "value").hit_tokens > replay(trace, 6, "lru").hit_tokens


def test_compare_ends_with_infinite_memory_and_reports_each_run():
    trace, seen = as_trace([[1, 2], [1, 2], [3]]), []
    results = compare(trace, ["value", "lru"], [2, 3], seen.append)
    assert [(r.policy, r.num_blocks) for r in results] == [
        ("value", 2), ("lru", 2), ("value", 3), ("lru", 3), ("lru", footprint(trace)),
    ]  # fmt: skip
    assert seen == results
    assert gap_closed(results[-1], results[1], results[-1]) in (0.0, 1.0)


@pytest.mark.parametrize(
    "line", ["nonsense", "{}", '{"input_length": 0, "hash_ids": []}', '{"input_length": 5, "hash_ids": ["a"]}']
)
def test_bad_line_is_named(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"input_length": 600, "hash_ids": [1, 2]}\n' + line)
    with pytest.raises(ConfigError, match="line 2 is not a request"):
        load_trace(path)


def test_partial_last_block_is_not_a_cacheable_block(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"input_length": 600, "hash_ids": [1, 2]}')
    assert load_trace(path) == [TraceRequest((1,), 600)]


def test_missing_trace_and_too_small_a_pool_are_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_trace(tmp_path / "none")
    with pytest.raises(ConfigError, match="has 3 blocks; 2 do not hold it"):
        replay(as_trace([[1, 2, 3]]), 2, "lru")


def test_script_prints_a_line_per_size_and_refuses_bad_input_in_one_line(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"input_length": 1500, "hash_ids": [1, 2, 3]}\n' * 3)

    def run(*args):
        command = [sys.executable, str(ROOT / "scripts" / "plan.py"), *args]
        return subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)

    done = run(f"--trace={path}", "--sizes=2,3", "--json")
    assert [json.loads(line)["blocks"] for line in done.stdout.splitlines()] == [2, 2, 3, 3, 2]
    failed = run(f"--trace={tmp_path}/none")
    assert failed.returncode != 0
    assert len(failed.stderr.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.skipif(not PUBLIC.exists(), reason="the public trace is not here")
def test_value_policy_is_above_lru_on_the_public_trace():
    trace = load_trace(PUBLIC)
    *runs, infinite = compare(trace, ["value", "lru"], [1000, 3000, 10000, 30000, 100000])
    closed = [gap_closed(value, lru, infinite) for value, lru in zip(runs[::2], runs[1::2], strict=True)]
    assert min(closed) > 0.05
    assert closed[2] > 0.12

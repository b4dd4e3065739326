"""A batch's lines are those of one run, however its files are cut and however often it is stopped."""

import fcntl
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import GOLDEN
from tests.environment import environment
from trillion_infer import ConfigError, SamplingParams
from trillion_infer.batch import BatchJob, open_rows
from trillion_infer.batch.source import find_files

ROWS = [{"prompt_token_ids": [5 + i, 9, 17], "max_tokens": 1 + i % 4, "ignore_eos": True} for i in range(10)]
GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture
def llm(make_llm):
    return make_llm("smollm2", page_size=8, prefill_chunk=16, precompile=False)


def write_jsonl(path: Path, rows: list) -> str:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return str(path)


def write_array_record(path: Path, rows: list) -> str:
    module = pytest.importorskip("array_record.python.array_record_module")
    writer = module.ArrayRecordWriter(str(path), "group_size:1")
    for row in rows:
        writer.write(json.dumps(row).encode())
    writer.close()
    return str(path)


def answered(llm, output: Path, files: list[str], in_flight: int = 4, facts: object = "f", part: slice = slice(None)):
    refused = BatchJob(open_rows(files)[part], output, {"facts": facts}).run(llm, GREEDY, in_flight)
    return refused, output.read_bytes()


@pytest.fixture
def source(tmp_path):
    return [write_jsonl(tmp_path / "in.jsonl", ROWS)]


def test_lines_come_in_order_with_each_rows_own_parameters(llm, tmp_path, source):
    lines = [json.loads(line) for line in answered(llm, tmp_path / "out", source)[1].splitlines()]
    assert [line["index"] for line in lines] == list(range(10))
    assert [len(line["token_ids"]) for line in lines] == [row["max_tokens"] for row in ROWS]
    whole = llm.generate([row["prompt_token_ids"] for row in ROWS], GREEDY)
    for line, output in zip(lines, whole, strict=True):
        assert output.outputs[0].token_ids[: len(line["token_ids"])] == line["token_ids"]


def test_array_records_and_jsonl_are_read_alike_by_pattern(llm, tmp_path, source):
    write_array_record(tmp_path / "a-0.array_record", ROWS[:3])
    write_jsonl(tmp_path / "a-1.jsonl", ["", *ROWS[3:7], "  "])
    write_array_record(tmp_path / "b.array_record", ROWS[7:])
    files = find_files(f"{tmp_path}/a-*,{tmp_path}/b.array_record")
    assert len(files) == 3
    lines = [
        [{k: v for k, v in json.loads(line).items() if k != "num_cached_tokens"} for line in text.splitlines()]
        for text in (answered(llm, tmp_path / "mixed", files, 1)[1], answered(llm, tmp_path / "one", source, 100)[1])
    ]
    assert lines[0] == lines[1]


def test_bad_rows_become_errors_in_their_place(llm, tmp_path):
    rows = [ROWS[0], "{", {"prompt_token_ids": [999]}, {"prompt_token_ids": [5], "colour": 1}, ROWS[1]]
    refused, text = answered(llm, tmp_path / "out", [write_jsonl(tmp_path / "in.jsonl", rows)])
    lines = [json.loads(line) for line in text.splitlines()]
    assert refused == 3
    assert ["error" in line for line in lines] == [False, True, True, True, False]
    assert "row 1 is not JSON" in lines[1]["error"]
    assert "colour" in lines[3]["error"]


@pytest.mark.parametrize("kept", [0.0, 0.31, 0.62, 1.0])
def test_what_is_written_is_not_answered_again(llm, tmp_path, source, kept):
    _, whole = answered(llm, tmp_path / "out", source)
    (tmp_path / "out").write_bytes(whole[: int(kept * len(whole))])
    steps = llm.stats()["steps"]
    _, again = answered(llm, tmp_path / "out", source)
    assert [json.loads(a)["token_ids"] for a in again.splitlines()] == [
        json.loads(w)["token_ids"] for w in whole.splitlines()
    ]
    assert (llm.stats()["steps"] == steps) == (kept == 1.0)


def test_shards_are_the_whole_without_overlap(llm, tmp_path, source):
    found = [answered(llm, tmp_path / f"out{i}", source, part=slice(i, None, 3))[1] for i in range(3)]
    indices = [[json.loads(line)["index"] for line in text.splitlines()] for text in found]
    assert indices == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]


def test_lines_of_another_job_are_left_alone(llm, tmp_path, source):
    _, before = answered(llm, tmp_path / "out", source)
    with pytest.raises(ConfigError, match="facts was 'f' and is 'other'"):
        answered(llm, tmp_path / "out", source, facts="other")
    assert (tmp_path / "out").read_bytes() == before
    (tmp_path / "notes").write_text("mine\n")
    (tmp_path / "notes.job").write_text(json.dumps({"facts": "f"}))
    with pytest.raises(ConfigError, match="line 1 is no line of this job"):
        answered(llm, tmp_path / "notes", source)
    assert (tmp_path / "notes").read_text() == "mine\n"


def test_two_processes_do_not_write_one_file(llm, tmp_path, source):
    with (tmp_path / "out").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="being written by another process"):
            answered(llm, tmp_path / "out", source)


@pytest.mark.parametrize("name", ["none.jsonl", "none-*.jsonl"])
def test_files_that_there_are_not_are_named(tmp_path, name):
    with pytest.raises(ConfigError, match="none"):
        find_files(str(tmp_path / name))


def test_a_file_that_is_no_array_record_is_named(tmp_path):
    (tmp_path / "x.array_record").write_text("text")
    with pytest.raises(ConfigError, match=r"x\.array_record is no ArrayRecord file"):
        open_rows([str(tmp_path / "x.array_record")])


def test_a_killed_run_goes_on_where_it_was(llm, tmp_path):
    """The real script, killed after its first lines and started again."""
    rows = [{**row, "max_tokens": 40} for row in ROWS * 20]
    source, output = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    command = [sys.executable, "scripts/batch.py", f"--model={GOLDEN / 'tiny' / 'smollm2'}", f"--input={source}"]
    command += [f"--output={output}", "--dtype=float32", "--max_running=2", "--kv_memory=16000000", "--noprecompile"]
    command += ["--in_flight=3", "--temperature=0"]
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE)
    deadline = time.monotonic() + 400
    while not (output.exists() and output.stat().st_size) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    _, told = process.communicate()
    before = output.read_bytes()
    assert 0 < before.count(b"\n") < len(rows), told
    ended = subprocess.run(command, env=environment(), capture_output=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    text = output.read_bytes()
    assert text.startswith(before[: before.rindex(b"\n") + 1])
    assert [json.loads(line)["index"] for line in text.splitlines()] == list(range(len(rows)))
    expected = llm.generate(ROWS[0]["prompt_token_ids"], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    assert json.loads(text.splitlines()[190])["token_ids"] == expected[0].outputs[0].token_ids


def test_without_grain_the_script_says_what_brings_it(tmp_path):
    """As in an environment of the library alone: the name is there for no importer."""
    source = write_jsonl(tmp_path / "in.jsonl", ROWS[:1])
    code = "import runpy, sys; sys.modules['grain'] = None; runpy.run_path('scripts/batch.py', run_name='__main__')"
    command = [sys.executable, "-c", code, f"--model={GOLDEN}", f"--input={source}", f"--output={tmp_path / 'out'}"]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert ended.returncode == 2
    told = r"error: grain is not installed; pip install 'trillion-infer\[(batch|train)\]'\.\n"  # both bring it
    assert re.fullmatch(told, ended.stderr)

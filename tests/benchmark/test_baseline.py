"""Finding and running the baseline, with a script that stands in for it."""

import json
import sys

import pytest

from trillion_infer.benchmark.baseline import SCRIPT, BaselineUnavailable, find_python, run_baseline
from trillion_infer.benchmark.records import Record
from trillion_infer.core.errors import ConfigError

ECHO = """
import json, sys
flags = dict(argument[2:].split("=", 1) for argument in sys.argv[1:])
work = json.load(open(flags["work"]))
line = {"engine": "transformers", "metric": "decode_tok_s", "value": len(work["decode"]["prompt_ids"]), "unit": "",
        "dtype": flags["dtype"], "model": flags["model"]}
print(json.dumps(line))
print(json.dumps({**line, "metric": "something_else"}))
"""


def test_the_script_of_the_baseline_is_in_this_checkout():
    assert SCRIPT.exists()


def test_records_come_from_the_work_and_flags_given(tmp_path):
    script = tmp_path / "echo.py"
    script.write_text(ECHO)
    work = {"decode": {"prompt_ids": [1, 2, 3], "out": 2}}
    found = list(run_baseline(sys.executable, "folder/m.gguf", "bfloat16", work, 1, script))
    assert found == [Record("transformers", "decode_tok_s", 3.0, "tokens/s", "bfloat16", "folder/m.gguf")]


def test_a_script_that_fails_is_a_reason_with_its_last_words(tmp_path):
    script = tmp_path / "fail.py"
    script.write_text("raise SystemExit('no room for the model')")
    with pytest.raises(BaselineUnavailable, match="no room for the model"):
        list(run_baseline(sys.executable, "m", "float32", {}, 1, script))


def test_a_missing_script_is_a_reason(tmp_path):
    with pytest.raises(BaselineUnavailable, match="comes with the source"):
        list(run_baseline(sys.executable, "m", "float32", {}, 1, tmp_path / "none.py"))


def make_python(tmp_path, status):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexit {status}\n")
    python.chmod(0o755)
    return str(python)


def test_a_python_with_torch_is_taken(tmp_path):
    assert find_python(make_python(tmp_path, 0)) == str(tmp_path / "python")


def test_a_python_that_was_named_and_lacks_torch_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot import torch and transformers"):
        find_python(make_python(tmp_path, 1))


def test_a_python_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="does not run"):
        find_python(str(tmp_path / "none"))


def test_the_baseline_can_be_switched_off():
    with pytest.raises(BaselineUnavailable, match="switched off"):
        find_python("")


def test_a_line_of_json_has_six_fields():
    line = json.loads(Record("e", "m", 1.0, "s", "float32", "x").line())
    assert list(line) == ["engine", "metric", "value", "unit", "dtype", "model"]

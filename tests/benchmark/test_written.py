"""Figures of several engines as a table between marks, and as a chart."""

import sys

import pytest

from trillion_infer.benchmark.baseline import BaselineUnavailable
from trillion_infer.benchmark.others import OTHERS, interpreter_of
from trillion_infer.benchmark.records import Record, ratios
from trillion_infer.benchmark.written import BEGIN, END, draw_chart, engines_of, markdown, write_section
from trillion_infer.core.errors import ConfigError


def rec(engine: str, metric: str, value: float) -> Record:
    return Record(engine, metric, value, "", "bfloat16", "m")


RECORDS = [
    rec("transformers", "decode_tok_s", 20.0),
    rec("trillion_infer", "decode_tok_s", 50.0),
    rec("trillion_infer", "startup_s", 2.0),
    rec("transformers", "startup_s", 5.0),
    rec("llama_cpp", "decode_tok_s", 40.0),
    rec("machine", "read_gb_s", 30.0),
]


def test_every_other_engine_has_its_ratio():
    found = {(r.engine, r.metric): r.value for r in ratios(RECORDS)}
    assert found == {
        ("trillion_infer/transformers", "decode_tok_s"): 2.5,
        ("trillion_infer/transformers", "startup_s"): 0.4,
        ("trillion_infer/llama_cpp", "decode_tok_s"): 1.25,
    }


def test_the_table_has_a_column_an_engine_and_a_ratio_each():
    lines = markdown(RECORDS, ["vllm is not measured: it is absent."]).splitlines()
    assert engines_of(RECORDS) == ["trillion_infer", "transformers", "llama_cpp"]
    assert "| metric | unit | trillion_infer | transformers | llama_cpp | / transformers | / llama_cpp |" in lines
    assert "| decode_tok_s | tokens/s | 50 | 20 | 40 | 2.50 | 1.25 |" in lines
    assert "| startup_s | s | 2 | 5 |  | 0.40 |  |" in lines
    assert "- vllm is not measured: it is absent." in lines
    assert all(line.count("|") == 8 for line in lines if line.startswith("|"))


def test_a_section_replaces_the_one_before(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Title\n\nwords\n")
    write_section(page, "first\n")
    page.write_text(page.read_text() + "\nafter\n")
    write_section(page, "second\n")
    assert page.read_text() == f"# Title\n\nwords\n\n{BEGIN}\nsecond\n{END}\n\nafter\n"


def test_half_a_pair_of_marks_is_an_error(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\nold\n")
    with pytest.raises(ConfigError, match="one of the marks"):
        write_section(page, "new\n")
    assert page.read_text() == f"{BEGIN}\nold\n"


def test_the_chart_is_an_image(tmp_path):
    pytest.importorskip("matplotlib")
    draw_chart(tmp_path / "chart.png", RECORDS)
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_an_engine_that_is_not_here_is_absent_with_its_reason():
    with pytest.raises(BaselineUnavailable, match="xllamacpp is not installed; name a Python"):
        interpreter_of(OTHERS["llama_cpp"], None, "m.gguf")
    with pytest.raises(ConfigError, match="cannot import xllamacpp"):
        interpreter_of(OTHERS["llama_cpp"], sys.executable, "m.gguf")
    with pytest.raises(BaselineUnavailable, match="give a Hugging Face folder with --vllm_model"):
        interpreter_of(OTHERS["vllm"], None, "m.gguf")


@pytest.mark.parametrize("engine", OTHERS.values(), ids=lambda engine: engine.name)
def test_every_engine_has_its_script(engine):
    assert engine.script.exists()


def test_the_protocol_measures_what_the_work_names():
    """A model that takes 10 ms before its first token and 1 ms for each other, by a clock of its own."""
    import importlib.util
    from pathlib import Path

    path = Path(__file__).parents[2] / "benchmarks" / "engines" / "protocol.py"
    spec = importlib.util.spec_from_file_location("protocol", path)
    protocol = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(protocol)
    now = [0.0]

    class Model:
        def run(self, prompts, out, running):
            start = now[0]
            now[0] += 0.010 * len(prompts) + 0.001 * len(prompts) * (out - 1)
            return [start, start + 0.010, now[0]]

    work = {
        "decode": {"prompt_ids": [1] * 8, "out": 11},
        "prefill": {"prompt_ids": [1] * 50, "out": 1},
        "offline": {"prompts": [[1] * 4, [2] * 6], "out": 11, "running": 2},
    }
    found = {}
    protocol.measure(Model(), work, 2, lambda metric, value, unit: found.update({metric: value}))
    assert found.pop("peak_rss_mb") > 0
    expected = {"decode_tok_s": 1000, "prefill_tok_s": 5000, "offline_out_tok_s": 550, "offline_total_tok_s": 800}
    assert found == pytest.approx(expected)

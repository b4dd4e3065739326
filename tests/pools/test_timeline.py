"""Timelines become a trace and a picture."""

import json

import pytest

from trillion_infer.cli.timeline import write_timeline
from trillion_infer.core.errors import ConfigError
from trillion_infer.engine.timeline import Timeline


def events() -> list[dict]:
    prefill, decode = Timeline("prefill-1"), Timeline("decode-2")
    prefill.add("prefill", "a", 1.0, 2.0, tokens=3)
    decode.add("transfer", "a", 1.5, 2.25)
    decode.add("decode", "a", 2.25, 4.0)
    return [*prefill.events(), *decode.events()]


def test_spans_keep_their_lengths_and_distances():
    spans = {event["cat"]: event for event in events() if event["ph"] == "X"}
    assert [spans[lane]["dur"] for lane in ("prefill", "transfer", "decode")] == [1_000_000, 750_000, 1_750_000]
    assert abs(spans["transfer"]["ts"] - spans["prefill"]["ts"] - 500_000) < 100_000
    assert spans["prefill"]["pid"] != spans["decode"]["pid"]


def test_a_trace_and_a_picture_are_written(tmp_path):
    write_timeline(events(), str(tmp_path / "run.json"))
    assert len(json.loads((tmp_path / "run.json").read_text())["traceEvents"]) == len(events())
    write_timeline(events(), str(tmp_path / "run.svg"))
    text = (tmp_path / "run.svg").read_text()
    assert "</svg>" in text


@pytest.mark.parametrize(("name", "what"), [("run.gif", "must end in"), ("run.png", "no spans yet")])
def test_what_cannot_be_drawn_is_refused(tmp_path, name, what):
    with pytest.raises(ConfigError, match=what):
        write_timeline([], str(tmp_path / name))

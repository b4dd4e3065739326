"""Phases of a start-up are told as bars and as a trace."""

import json
import os
import subprocess
import sys
import threading

from trillion_infer.core.timeline import BAR, Timeline


def test_a_phase_is_timed_from_the_origin():
    timeline = Timeline(origin=0.0)
    with timeline.phase("read"):
        pass
    (phase,) = timeline.phases
    assert phase.name == "read"
    assert 0 < phase.start <= phase.end


def test_bars_show_when_each_phase_ran():
    timeline = Timeline(origin=0.0)
    timeline.add("late", 2.0, 4.0)
    timeline.add("early", 0.0, 1.0)
    early, late = timeline.bars().splitlines()
    assert early == f"early {'█' * (BAR // 4)}{' ' * (BAR - BAR // 4)}    1.00 s"
    assert late == f"late  {' ' * (BAR // 2)}{'█' * (BAR // 2)}    2.00 s"


def test_the_trace_has_a_lane_a_thread(tmp_path):
    timeline = Timeline(origin=0.0)
    timeline.add("main work", 0.0, 1.5)
    other = threading.Thread(target=lambda: timeline.add("side work", 0.5, 1.0), name="side")
    other.start()
    other.join()
    timeline.write_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {e["args"]["name"]: e["tid"] for e in events if e["ph"] == "M"}
    spans = {e["name"]: (e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"}
    assert spans["side work"] == (lanes["side"], 500_000, 500_000)
    assert spans["main work"][0] != lanes["side"]


def test_a_process_knows_how_long_it_has_run():
    """The interpreter's own start and a sleep are in the first phase."""
    code = (
        "import time; time.sleep(0.2); from trillion_infer.core.timeline import Timeline; "
        "print(Timeline.of_process().phases[0].end)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert 0.2 <= float(done.stdout) < 60


def test_no_phases_are_no_bars():
    assert Timeline().bars() == ""

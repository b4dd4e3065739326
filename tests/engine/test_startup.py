"""What a start-up did when."""

import json


def test_every_phase_of_a_start_is_in_the_trace(make_llm, tmp_path):
    llm = make_llm.fresh("smollm2", precompile=False, startup_trace=str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = {event["name"]: event for event in events if event["ph"] == "X"}
    assert set(spans) == {
        "start and imports",
        "open checkpoint",
        "load tokenizer",
        "plan",
        "load weights",
        "size pools, open bundle",
        "allocate pools",
    }
    assert spans["load weights"]["tid"] != spans["plan"]["tid"]
    assert len(llm.report.timeline.bars().splitlines()) == len(spans)
    llm.close()

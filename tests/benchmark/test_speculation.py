"""Prompts and figures of the speculation workload."""

import pytest

from trillion_infer.benchmark.records import unit_of
from trillion_infer.benchmark.speculation import KINDS, prompts, speculate
from trillion_infer.benchmark.workloads import parse_workloads


def test_forty_formulaic_prompts_half_for_measuring_only():
    texts = {(kind, split): prompts(kind, split) for kind in ("tool", "edit") for split in ("tune", "measure")}
    assert [len(each) for each in texts.values()] == [10] * 4
    assert len({text for each in texts.values() for text in each}) == 40
    assert len(set(prompts("chat"))) == 32


def test_speculate_is_asked_for_by_name_only():
    assert parse_workloads("speculate,decode") == ("decode", "speculate")
    assert "speculate" not in parse_workloads("all")


def test_units_of_named_metrics():
    assert unit_of("edit_drafts_ratio") == "ratio"
    assert unit_of("chat_ngram_acceptance_rate") == "share"
    with pytest.raises(KeyError):
        unit_of("edit_drafts")


@pytest.mark.slow
def test_formulaic_text_is_faster_with_drafts(smollm2_path):
    """Answers are equal (the workload asserts it); drafts stand, and most of all in edits."""
    options = {"model": smollm2_path, "dtype": "float32", "max_model_len": 1024, "kv_memory": 400 * 2**20}
    found = dict(speculate(options, 1))
    assert {f"{kind}_drafts_ratio" for kind in KINDS} < set(found)
    assert found["edit_drafts_ratio"] > 1.2

"""The transfer workload on a tiny model: what a hand-off within one process costs."""

from tests.conftest import GOLDEN
from tests.engine.test_equalities import prompts_of
from trillion_infer.benchmark.records import unit_of
from trillion_infer.benchmark.transfer import transfer

OPTIONS = {"model": GOLDEN / "tiny" / "smollm2", "dtype": "float32", "page_size": 8, "prefill_chunk": 16}


def test_prompts_are_handed_over_and_measured():
    spans: list[dict] = []
    options = {**OPTIONS, "max_running": 1, "kv_memory": 16 * 2**20, "bundle": ""}
    figures = transfer(options, prompts_of(3, [200, 200]), spans.extend)
    assert all(figure >= 0 and unit_of(name) for name, figure in figures.items())
    assert min(figures["handoff_prefill_s"], figures["handoff_gb_s"], figures["copy_ratio"]) > 0
    lanes = [event["cat"] for event in spans if event["ph"] == "X"]
    assert lanes.count("transfer") == 3 * 2  # 25 blocks in two batches, of the prompt that warms up, too

"""Models that draft in pools of processes: their KV comes with the prompt's, and answers are those without drafts."""

import contextlib

import pytest

from tests.conftest import GOLDEN
from tests.pools.conftest import deployed
from tests.pools.test_processes import all_home, check, expected_texts, requests_of, run_all
from tests.pools.workers import tiny_model

TINY = GOLDEN / "tiny"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "speculate"),
    [
        ("smollm2", f"draft:{TINY / 'smollm2'}"),
        ("llama_deep", f"eagle3:{TINY / 'eagle3_llama'}"),
        ("deepseek_v3_mtp", "mtp"),
    ],
)
def test_models_draft_between_processes(tmp_path, make_llm, model, speculate):
    """60 greedy and seeded requests with shared beginnings, one prefill and one decode process."""
    path = tiny_model(tmp_path / model, model)
    llm = make_llm.fresh(path, max_running=8, prefill_chunk=64, page_size=8, kv_memory=8e6)
    roles = [("prefill", "tensor=1", False), ("decode", "tensor=1", False)]
    with contextlib.closing(llm), deployed(path, roles, f"--speculate={speculate}") as (prefill, decode, router):
        requests = requests_of(31, 60)
        assert check(run_all(router.url, requests), expected_texts(llm, requests)) == len(requests)
        assert decode[0].metric("trillion_infer:handoffs") >= 30
        assert decode[0].metric("trillion_infer:handoff_recomputed") == 0
        assert decode[0].metric("vllm:spec_decode_num_draft_tokens") > 0
        all_home([*prefill, *decode])

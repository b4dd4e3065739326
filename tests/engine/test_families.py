"""Every family through the paged engine against transformers: prefill in chunks, then decode, float32."""

import numpy as np
import pytest

from tests.conftest import GOLDEN
from tests.engine.helpers import check_idle, greedy, log_softmax

DENSE = [
    "llama_deep",
    "llama_dynamic",
    "llama_linear",
    "llama_llama3",
    "llama_yarn",
    "llama_yarn_v5",
    "smollm2",
    "qwen3",
    "gemma3_text",
    "gemma3_text_scaled",
]
MIXTURES = [
    "qwen3_moe",
    "deepseek_v3",
    "deepseek_v3_noqlora",
    "deepseek_v3_fp8",
    "deepseek_v3_mtp",
    "kimi_k2",
    "kimi_k25",
    "llama4_scout",
    "llama4_maverick",
    "gpt_oss",
    "gpt_oss_mxfp4",
]
SMOKE = ["smollm2", "gemma3_text", "deepseek_v3"]


def cases() -> list:
    return [pytest.param(n, marks=[pytest.mark.smoke] if n in SMOKE else []) for n in [*DENSE, *MIXTURES]]


@pytest.mark.parametrize("name", cases())
def test_chunked_prefill_and_decode_match_transformers(make_llm, name):
    """Tokens are equal; log-probabilities agree to 1e-4 at every prompt position and decoded token (U26: prompts are
    longer than the chunk)."""
    llm = make_llm(name, prefill_chunk=16, page_size=8)
    golden = np.load(GOLDEN / "tiny" / name / "golden.npz")
    prompts = [golden[f"prompt_{i}"].tolist() for i in range(3)]
    lengths = [min(48, llm.max_model_len - len(prompt)) for prompt in prompts]
    outputs = llm.generate(prompts, [greedy(n, logprobs=20, prompt_logprobs=20) for n in lengths])
    for i, output in enumerate(outputs):
        answer = output.outputs[0]
        assert answer.token_ids == golden[f"tokens_{i}"][: lengths[i]].tolist()
        expected = log_softmax(np.concatenate([golden[f"logits_{i}"][:-1], golden[f"token_logits_{i}"][: lengths[i]]]))
        found = [*output.prompt_logprobs[1:], *answer.logprobs]
        assert len(found) == len(expected)
        for position, (entry, row) in enumerate(zip(found, expected, strict=True)):
            ids = list(entry)
            np.testing.assert_allclose([entry[t].logprob for t in ids], row[ids], atol=1e-4, err_msg=f"at {position}")
    check_idle(llm)

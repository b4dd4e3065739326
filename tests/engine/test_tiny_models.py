"""The tiny random models that come for users' tests: every family runs, and a batch changes nothing in bfloat16."""

import pytest

from tests.engine.helpers import check_idle, greedy, tokens_of
from tests.engine.test_equalities import prompts_of
from trillion_infer import LLM
from trillion_infer.testing.tiny_models import FAMILIES, tiny_config

OPTIONS = {"max_running": 4, "kv_memory": 2**22, "prefill_chunk": 16, "precompile": False}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_runs_and_repeats(family):
    prompts = prompts_of(3, [5, 40])
    llm = LLM(tiny_config(family), **OPTIONS)
    first = tokens_of(llm.generate(prompts, greedy(6)))
    assert first == tokens_of(llm.generate(prompts, greedy(6)))
    check_idle(llm)


def test_in_bfloat16_a_row_does_not_depend_on_its_batch_u51(make_llm):
    """The native kernels give a row the same bits in any batch, so tokens are equal in bfloat16 too."""
    llm = make_llm("smollm2", dtype="bfloat16", page_size=8, prefill_chunk=16)
    prompt, *others = prompts_of(4, [20, 3, 33, 7, 12, 1, 50, 9])
    alone = tokens_of(llm.generate(prompt, greedy(16)))[0]
    for size in (2, 3, 8):
        assert tokens_of(llm.generate([prompt, *others[: size - 1]], greedy(16)))[0] == alone


def test_bfloat16_weights_stay_close_to_float32_u06(make_llm):
    """The bound that the documents state: 0.15 in log-probability on this model."""
    full, half = (make_llm("smollm2", dtype=d, page_size=8, prefill_chunk=16) for d in ("float32", "bfloat16"))
    prompt = prompts_of(4, [60])[0]
    params = greedy(1, prompt_logprobs=0)
    ours, theirs = (llm.generate(prompt, params)[0].prompt_logprobs[1:] for llm in (half, full))
    for a, b, token in zip(ours, theirs, prompt[1:], strict=True):
        assert abs(a[token].logprob - b[token].logprob) < 0.15

"""The real model against transformers on 41 prompts of 1 to 3,000 tokens: text, code, Korean, chat. float32."""

import json
from functools import cache

import numpy as np
import pytest

from tests.conftest import GOLDEN
from tests.engine.helpers import check_idle, greedy
from trillion_infer import SamplingParams

TIE = 2e-3


@cache
def golden(name: str):
    folder = GOLDEN / name
    return json.loads((folder / "prompts.json").read_text()), dict(np.load(folder / "golden.npz"))


def check_against(llm, name: str) -> None:
    """48 greedy tokens equal up to a near tie of the oracle's own; log-probabilities of prompt and answer to 2e-3."""
    prompts, arrays = golden(name)
    params = greedy(48, logprobs=0, prompt_logprobs=0)
    outputs = llm.generate([prompt["ids"] for prompt in prompts], params)
    for j, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        expected, found = arrays["tokens"][j].tolist(), output.outputs[0].token_ids
        same = next((i for i, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1]), 48)
        gap = None if same == 48 else float(arrays["gaps"][j][same])
        assert gap is None or gap < TIE, f"{prompt['name']}: token {same} differs, where the top-two gap is {gap}"
        start, stop = arrays["prompt_offsets"][j : j + 2]
        ours = [entry[t].logprob for entry, t in zip(output.prompt_logprobs[1:], prompt["ids"][1:], strict=True)]
        np.testing.assert_allclose(ours, arrays["prompt_logprobs"][start + 1 : stop], atol=2e-3, err_msg=prompt["name"])
        chosen = [entry[t].logprob for entry, t in zip(output.outputs[0].logprobs, found, strict=True)]
        np.testing.assert_allclose(chosen[:same], arrays["token_logprobs"][j][:same], atol=2e-3, err_msg=prompt["name"])
    check_idle(llm)


def test_41_prompts_match_transformers(smollm2):
    check_against(smollm2, "smollm2")


@pytest.mark.slow
def test_gemma3_270m_matches_transformers(make_llm):
    from trillion_infer.weights.fetch import fetch_gemma3_270m

    check_against(make_llm(fetch_gemma3_270m(), max_model_len=2048, kv_memory=256 * 2**20), "gemma3_270m")


def test_chat_prompts_are_the_templates_with_one_bos_u32(smollm2):
    """LLM.chat tokenises what transformers' apply_chat_template(tokenize=True) gives."""
    for case in json.loads((GOLDEN / "smollm2" / "chat.json").read_text()):
        options = {key: case[key] for key in ("tools", "add_generation_prompt") if key in case}
        text = smollm2.render_chat(case["messages"], **options)
        assert text == case["text"]
        assert smollm2.tokenizer.encode(text) == case["ids"]


@pytest.mark.parametrize(
    ("run", "penalty"),
    [
        ("none", {}),
        ("repetition_penalty", {"repetition_penalty": 1.5}),
        ("presence_penalty", {"presence_penalty": 2.0}),
        ("frequency_penalty", {"frequency_penalty": 2.0}),
    ],
)
def test_penalties_match_transformers_from_the_first_step_u22(smollm2, run, penalty):
    golden_runs = json.loads((GOLDEN / "smollm2" / "penalties.json").read_text())
    case = golden_runs["runs"][run]
    output = smollm2.generate({"prompt_token_ids": golden_runs["ids"]}, greedy(len(case["tokens"]), **penalty))
    found = output[0].outputs[0].token_ids
    for i, (expected, ours, gap) in enumerate(zip(case["tokens"], found, case["gaps"], strict=True)):
        if expected != ours:
            assert gap < TIE, f"token {i} differs, where the gap is {gap}"
            break


def test_capital_of_france(smollm2):
    output = smollm2.chat([{"role": "user", "content": "What is the capital of France?"}], greedy(32, ignore_eos=False))
    assert "Paris" in output[0].outputs[0].text
    assert output[0].outputs[0].finish_reason == "stop"


def test_streamed_equals_whole(smollm2):
    params = SamplingParams(temperature=0.9, seed=7, max_tokens=40, stop=["zzz", "the end"])
    prompt = "한국의 수도는 서울이며, café naïve 😀"
    assert "".join(smollm2.stream(prompt, params)) == smollm2.generate(prompt, params)[0].outputs[0].text


def test_interleaved_streams_lose_nothing_u30(smollm2):
    params = greedy(12)
    prompts = [f"The number {i} is" for i in range(4)]
    streams = [smollm2.stream(prompt, params) for prompt in prompts]
    texts = [""] * 4
    for _ in range(12):
        for i, stream in enumerate(streams):
            texts[i] += next(iter(stream), "")
    texts = [text + "".join(stream) for text, stream in zip(texts, streams, strict=True)]
    assert texts == [output.outputs[0].text for output in smollm2.generate(prompts, params)]

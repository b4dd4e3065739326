"""/v1/completions by OpenAI's client."""

import json
import math

import openai
import pytest

from tests.serve.serving import MODEL, letters, serving, user
from trillion_infer import InvalidRequestError, SamplingParams
from trillion_infer.core.outputs import Logprob
from trillion_infer.serve.fields import dump_json
from trillion_infer.serve.logprobs import FLOOR, completion_logprobs


@pytest.fixture(scope="module")
def served():
    with serving("Hello, world!", max_model_len=64) as served:
        yield served


@pytest.fixture(scope="module")
def client(served):
    return served.openai()


def complete(client, prompt="ABC", **options):
    return client.completions.create(model=MODEL, prompt=prompt, **options)


@pytest.mark.parametrize("prompt", ["", [""]])
def test_an_empty_prompt_is_refused_and_the_next_request_served_u07(served, client, prompt):
    with pytest.raises(openai.BadRequestError, match="prompt is empty after tokenisation"):
        complete(client, prompt)
    assert served.get("/health").status_code == 200
    assert complete(client).choices[0].text == "Hello, world!"


def test_an_empty_prompt_is_refused_offline_u07(served):
    with pytest.raises(ValueError, match="empty after tokenisation"):
        served.generator.prepare("x", "", SamplingParams())


@pytest.mark.parametrize("given", [{}, {"max_tokens": None}])
def test_without_max_tokens_the_context_is_the_limit_u09(given):
    with serving([65], max_model_len=20) as served:
        answer = served.post("/v1/completions", {"model": MODEL, "prompt": "ABCD", **given}).json()
        body = {"model": MODEL, "messages": user(""), **given}
        chat = served.post("/v1/chat/completions", body).json()
    assert answer["usage"]["completion_tokens"] == answer["max_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"
    assert chat["usage"]["completion_tokens"] == 20 - len("[user][assistant]")


@pytest.mark.parametrize(
    ("length", "max_tokens", "numbers"),
    [(65, 1, ("65", "1", "64")), (64, 1, ("64", "1", "64")), (60, 5, ("60", "5", "64"))],
)
def test_what_never_fits_the_context_is_refused_with_its_numbers_u12(client, length, max_tokens, numbers):
    with pytest.raises(openai.BadRequestError) as refusal:
        complete(client, "x" * length, max_tokens=max_tokens)
    assert all(number in str(refusal.value) for number in numbers)
    assert complete(client, max_tokens=5).choices[0].text == "Hello"


@pytest.mark.parametrize("token", [512, -1, 2**63])
def test_token_ids_outside_the_vocabulary_are_named_u13(served, client, token):
    with pytest.raises(openai.BadRequestError) as refusal:
        complete(client, [65, token])
    assert str(token) in str(refusal.value)
    assert "[0, 512)" in str(refusal.value)
    with pytest.raises(InvalidRequestError):
        served.generator.prepare("x", [65, token], SamplingParams())
    assert complete(client, [65, 66]).choices[0].text == "Hello, world!"


def test_logprobs_of_nothing_are_finite_numbers_u24():
    entry = {65: Logprob(0.0, 1, "A"), 66: Logprob(-math.inf, 2, "B"), 67: Logprob(math.nan, 3, "C")}
    written = json.loads(dump_json(completion_logprobs([65], [entry], 3)))
    assert written["top_logprobs"] == [{"A": 0.0, "B": FLOOR, "C": FLOOR}]


def test_logprobs_with_top_k_one_and_echo_are_json_u24(client):
    with pytest.raises(openai.BadRequestError, match="logprobs"):
        complete(client, logprobs=21)
    answer = complete(client, logprobs=5, max_tokens=3, extra_body={"top_k": 1})
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["H", "e", "l"]
    assert logprobs.text_offset == [0, 1, 2]
    assert [len(top) for top in logprobs.top_logprobs] == [1, 1, 1]


def test_streamed_text_is_the_whole_text_and_one_chunk_ends_it_u40(client):
    whole = complete(client)
    chunks = list(complete(client, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text == "Hello, world!"
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]
    assert all(chunk.id == chunks[0].id for chunk in chunks)


def test_a_length_stop_says_so_in_one_chunk_u40(client):
    chunks = list(complete(client, stream=True, max_tokens=4, n=2))
    ends = [(c.choices[0].index, c.choices[0].finish_reason) for c in chunks if c.choices[0].finish_reason]
    assert sorted(ends) == [(0, "length"), (1, "length")]


@pytest.mark.parametrize("options", [{"include_usage": True}, {"include_usage": False}, None])
def test_usage_comes_in_a_last_chunk_of_its_own_if_asked_for_u41(served, options):
    body = {"model": MODEL, "prompt": "ABC", "stream": True, "stream_options": options}
    lines = [line for line in served.post("/v1/completions", body).text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    with_usage = [chunk for chunk in chunks if chunk.get("usage")]
    assert all(len(chunk["choices"]) == 1 for chunk in chunks if not chunk.get("usage"))
    if options and options["include_usage"]:
        assert with_usage == chunks[-1:]
        assert with_usage[0]["choices"] == []
        usage = with_usage[0]["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 14, 17)
    else:
        assert with_usage == []


def test_prompts_and_completions_are_numbered_in_order():
    with serving(letters) as served:
        answer = complete(served.openai(), ["x", "xx"], n=2, max_tokens=3)
    assert [(c.index, c.text) for c in answer.choices] == [(0, "bcd"), (1, "bcd"), (2, "cde"), (3, "cde")]
    assert answer.usage.prompt_tokens == 3
    assert answer.usage.completion_tokens == 12


def test_echo_puts_the_prompt_before_the_text(client):
    assert complete(client, echo=True, max_tokens=2).choices[0].text == "ABCHe"
    chunks = list(complete(client, echo=True, max_tokens=2, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "ABCHe"
    alone = complete(client, echo=True, max_tokens=0)
    assert (alone.choices[0].text, alone.usage.completion_tokens) == ("ABC", 0)


def test_a_stop_string_ends_the_text(client):
    answer = complete(client, stop=["o, w"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Hell", "stop")


def test_every_sampling_field_is_taken(client):
    answer = complete(
        client,
        temperature=0.5,
        top_p=0.9,
        seed=7,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"65": 5},
        user="somebody",
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": False},
    )
    assert answer.choices[0].text == "Hello, world!"


def test_cached_tokens_are_reported(client):
    complete(client, "y" * 40, max_tokens=2)
    usage = complete(client, "y" * 40, max_tokens=2).usage
    assert usage.prompt_tokens_details.cached_tokens == 32

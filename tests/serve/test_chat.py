"""/v1/chat/completions by OpenAI's client."""

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.serve.serving import EOS, MODEL, TEMPLATE, THINKING, letters, serving, user
from trillion_infer import SamplingParams
from trillion_infer.testing.byte_tokenizer import byte_tokenizer
from trillion_infer.text import Tokenizer
from trillion_infer.text.chat import render_chat


@pytest.fixture(scope="module")
def served():
    with serving("Hello, world!") as served:
        yield served


@pytest.fixture(scope="module")
def client(served):
    return served.openai()


def chat(client, messages="hi", **options):
    messages = user(messages) if isinstance(messages, str) else messages
    return client.chat.completions.create(model=MODEL, messages=messages, **options)


def text_of(chunks):
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_max_completion_tokens_is_max_tokens_u11(client):
    answer = chat(client, max_completion_tokens=5)
    assert (answer.choices[0].message.content, answer.usage.completion_tokens) == ("Hello", 5)
    assert answer.choices[0].finish_reason == "length"
    assert chat(client, max_completion_tokens=5, max_tokens=5).usage.completion_tokens == 5
    with pytest.raises(openai.BadRequestError, match="max_completion_tokens is 6"):
        chat(client, max_completion_tokens=6, max_tokens=5)


def test_sixteen_concurrent_streams_each_get_all_their_tokens_u30():
    def ask(i):
        chunks = list(
            chat(served.openai(), "x" * i, max_tokens=20 + i, stream=True, stream_options={"include_usage": True})
        )
        return text_of(chunks), chunks[-1].usage.completion_tokens

    with serving(letters, max_running=5) as served, ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(16)))
        served.check_idle()
    base = len("[user][assistant]")
    for i, answer in enumerate(answers):
        expected = "".join(chr(letters(index, base + i)) for index in range(20 + i))
        assert answer == (expected, 20 + i)


def test_36_chats_of_mixed_lengths_and_cached_prefixes_all_end_u46():
    def ask(i):
        return chat(served.openai(), "p" * (7 * (i % 9)), max_tokens=5 + i % 4).usage.completion_tokens

    with serving(letters, max_running=6, num_pages=64) as served, ThreadPoolExecutor(36) as pool:
        assert list(pool.map(ask, range(36))) == [5 + i % 4 for i in range(36)]
        assert served.get("/health").status_code == 200
        served.check_idle()


def test_one_bos_offline_and_served_u32(byte_metadata):
    tokenizer = Tokenizer.from_gguf(byte_metadata)
    text = render_chat(tokenizer, user("hi"))
    with serving(lambda index, prompt_len: 70, tokenizer) as served:
        body = {"model": MODEL, "messages": user("hi"), "max_tokens": 1, "return_token_ids": True}
        online = served.post("/v1/chat/completions", body).json()["choices"][0]["prompt_token_ids"]
        tokenized = served.post("/tokenize", {"messages": user("hi")}).json()["tokens"]
        offline = served.generator.prepare("x", text, SamplingParams())[1][0].prompt_ids
    assert online == offline == tokenized == tokenizer.encode(text, add_special_tokens=False)
    assert online.count(tokenizer.bos_id) == 1


def test_text_parts_are_joined_and_others_refused_u34(served, client):
    body = {"model": MODEL, "max_tokens": 1, "return_token_ids": True}
    question = "who is mickey mouse?"
    asked = [
        served.post("/v1/chat/completions", {**body, "messages": user(content)}).json()["choices"][0]
        for content in (question, [{"type": "text", "text": question}])
    ]
    assert asked[0]["prompt_token_ids"] == asked[1]["prompt_token_ids"]
    with pytest.raises(openai.BadRequestError, match="image_url"):
        chat(client, user([{"type": "image_url", "image_url": {"url": "x"}}]))


def test_natural_end_of_a_stream_has_one_terminal_chunk_u40(client):
    chunks = list(chat(client, stream=True, n=2))
    ends = [(c.choices[0].index, c.choices[0].finish_reason) for c in chunks if c.choices[0].finish_reason]
    assert sorted(ends) == [(0, "stop"), (1, "stop")]
    assert text_of([c for c in chunks if c.choices[0].index == 1]) == "Hello, world!"
    assert chunks[0].choices[0].delta.role == "assistant"


def test_usage_chunk_has_no_choices_u41(client):
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert usage.prompt_tokens + usage.completion_tokens == usage.total_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert all(chunk.usage is None for chunk in chat(client, stream=True))


def test_logprobs_come_once_a_token_streamed_or_not(client):
    whole = chat(client, logprobs=True, top_logprobs=2, max_tokens=4).choices[0].logprobs.content
    chunks = chat(client, logprobs=True, top_logprobs=2, max_tokens=4, stream=True)
    streamed = [entry for c in chunks if c.choices[0].logprobs for entry in c.choices[0].logprobs.content]
    assert streamed == whole
    assert [(entry.token, entry.bytes) for entry in whole] == [(c, [ord(c)]) for c in "Hell"]
    with pytest.raises(openai.BadRequestError, match="top_logprobs"):
        chat(client, top_logprobs=2)


def test_reasoning_is_told_from_content():
    script = [*THINKING.encode("<think>so so</think>Hi"), EOS]
    with serving(script, THINKING) as served:
        message = chat(served.openai()).choices[0].message
        chunks = list(chat(served.openai(), stream=True))
    assert (message.reasoning_content, message.content) == ("so so", "Hi")
    assert text_of(chunks) == "Hi"
    reasoning = [getattr(c.choices[0].delta, "reasoning_content", None) or "" for c in chunks]
    assert "".join(reasoning) == "so so"


def test_the_templates_own_refusal_is_a_400():
    refusing = TEMPLATE + "{{ raise_exception('roles must alternate') }}"
    with serving("x", byte_tokenizer(chat_template=refusing)) as served:
        answer = served.post("/v1/chat/completions", {"model": MODEL, "messages": user("hi")})
    assert answer.status_code == 400
    assert "roles must alternate" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_waits_for_min_tokens_where_output_is_read_too_u18(stream):
    options = {"stop": ["X"], "extra_body": {"min_tokens": 6}, "max_tokens": 20}
    with serving("aXbXcdXefg", THINKING) as served:
        answer = chat(served.openai(), stream=stream, **options)
        text = text_of(answer) if stream else answer.choices[0].message.content
    assert text == "aXbXcd"

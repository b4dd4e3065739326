"""/v1/responses by OpenAI's client."""

import json

import openai
import pytest

from tests.serve.serving import EOS, MARKED, MODEL, THINKING, serving

TOOL = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def ask(said, tokenizer=MARKED, **options):
    """(whole response, events of the streamed one)."""
    options = {"model": MODEL, "input": "hi", **options}
    with serving([*tokenizer.encode(said), EOS], tokenizer) as served:
        client = served.openai()
        whole = client.responses.create(**options)
        events = list(client.responses.create(**options, stream=True))
        served.check_idle()
    return whole, events


def without_ids(response):
    return [item.model_dump(exclude={"id", "call_id"}) for item in response.output]


@pytest.mark.parametrize(
    ("text", "tokenizer", "options"),
    [
        ("Hello", MARKED, {}),
        ("Hello", MARKED, {"max_output_tokens": 3}),
        (f"So:{CALL}", MARKED, {"tools": [TOOL]}),
        ("<think>hm</think>Hello", THINKING, {}),
    ],
)
def test_a_streamed_response_is_the_whole_response(text, tokenizer, options):
    whole, events = ask(text, tokenizer, **options)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    last = events[-1]
    assert last.type == f"response.{whole.status}"
    assert without_ids(last.response) == without_ids(whole)
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == whole.output_text


def test_a_cut_off_response_is_incomplete():
    whole, _ = ask("Hello", max_output_tokens=3)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (whole.output_text, whole.usage.output_tokens) == ("Hel", 3)


def test_calls_are_items_and_their_results_go_back():
    whole, events = ask(CALL, tools=[TOOL], tool_choice="required")
    call = whole.output[0]
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Paris"})
    arguments = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert json.loads("".join(arguments)) == {"city": "Paris"}
    conversation = [
        {"role": "user", "content": "hi"},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    assert ask("It is sunny.", input=conversation, tools=[TOOL])[0].output_text == "It is sunny."


def test_a_schema_holds_the_text():
    text = {"format": {"type": "json_schema", "name": "x", "schema": {"const": 5}}}
    assert ask("~", text=text)[0].output_text == "5"


def test_log_probabilities_are_those_of_the_text():
    options = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole, events = ask("<think>hm</think>Hello", THINKING, **options)
    expected = list("Hello")
    assert [each.token for each in whole.output[1].content[0].logprobs] == expected
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [each.token for event in deltas for each in event.logprobs] == expected
    assert events[-1].response.output[1].content[0].logprobs == whole.output[1].content[0].logprobs


def test_tokens_of_the_reasoning_are_counted():
    whole, events = ask("<think>hm</think>Hello", THINKING)
    counts = [each.usage.output_tokens_details.reasoning_tokens for each in (whole, events[-1].response)]
    assert counts == [4, 4]  # both marks are tokens of their own


@pytest.mark.parametrize(
    "options",
    [
        {"previous_response_id": "x"},
        {"input": [{"type": "image"}]},
        {"input": [5]},
        {"truncation": "auto"},
        {"include": ["file_search_call.results"]},
        {"metadata": [], "stream": False},
    ],
)
def test_what_is_not_supported_is_refused(options):
    with pytest.raises(openai.BadRequestError):
        ask("x", **options)

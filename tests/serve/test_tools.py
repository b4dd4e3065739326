"""Tool calls by OpenAI's client, streamed and not."""

import json

import openai
import pytest

from tests.serve.serving import EOS, MARKED, MODEL, THINKING, serving, user

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "read-clock", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TWO = f'{CALL}\n<tool_call>\n{{"name": "read-clock", "arguments": {{}}}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def ask(text, tokenizer=MARKED, **options):
    """(whole choice, streamed chunks) of the same request to a model that says `text`."""
    options = {"tools": [WEATHER, CLOCK], "messages": user("hi"), "model": MODEL, **options}
    with serving([*tokenizer.encode(text), EOS], tokenizer) as served:
        client = served.openai()
        whole = client.chat.completions.create(**options).choices[0]
        chunks = list(client.chat.completions.create(**options, stream=True))
        served.check_idle()
    return whole, chunks


def rebuilt(chunks):
    """(content, calls as (name, arguments), finish reasons) of a stream."""
    content, calls = "", {}
    for delta in (chunk.choices[0].delta for chunk in chunks):
        content += delta.content or ""
        for part in delta.tool_calls or ():
            if part.index not in calls:
                assert part.id
                calls[part.index] = [part.function.name, ""]
            else:
                assert part.function.name is None
            calls[part.index][1] += part.function.arguments
    ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason]
    return content, [tuple(call) for call in calls.values()], ends


def calls_of(choice):
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]


@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
def test_a_call_is_told_from_text_and_streamed_whole_t18_t20_u37(choice):
    whole, chunks = ask(CALL, tool_choice=choice)
    assert calls_of(whole) == [("get_weather", '{"city": "Paris"}')]
    assert rebuilt(chunks) == ("", calls_of(whole), ["tool_calls"])
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_is_made_whatever_the_model_says_u37(choice):
    names = {"get_weather"} if choice == NAMED else {"get_weather", "read-clock"}
    whole, chunks = ask("I would rather chat", tool_choice=choice, max_tokens=400)
    assert len(calls_of(whole)) >= 1
    for name, arguments in calls_of(whole):
        assert name in names
        assert json.loads(arguments) in ({"city": "Paris"}, {"city": "Rome"}, {})
    assert rebuilt(chunks)[1] == calls_of(whole)


@pytest.mark.parametrize(
    ("choice", "tools"),
    [({"type": "function", "function": {"name": "nobody"}}, [WEATHER]), ("required", None), ("sometimes", [WEATHER])],
)
def test_choices_that_cannot_be_met_are_refused_u37(choice, tools):
    with pytest.raises(openai.BadRequestError) as refusal:
        ask(CALL, tool_choice=choice, tools=tools or openai.NOT_GIVEN)
    assert refusal.value.param.startswith("tool_choice")


@pytest.mark.parametrize("tools", [[WEATHER], openai.NOT_GIVEN])
def test_with_choice_none_call_text_is_only_text_u38(tools):
    whole, chunks = ask(CALL, tool_choice="none", tools=tools)
    assert whole.message.tool_calls is None
    assert whole.finish_reason == "stop"
    assert rebuilt(chunks) == (whole.message.content, [], ["stop"])


def test_two_calls_are_both_whole_t08():
    whole, chunks = ask(TWO)
    assert calls_of(whole) == [("get_weather", '{"city": "Paris"}'), ("read-clock", "{}")]
    assert rebuilt(chunks)[1] == calls_of(whole)


def test_parallel_calls_can_be_forbidden():
    assert len(calls_of(ask(TWO, parallel_tool_calls=False, max_tokens=200)[0])) == 1


def test_auto_calls_keep_to_their_schema():
    whole, _ = ask(CALL.replace("Paris", "Lyon"), max_tokens=200)
    assert all(json.loads(arguments)["city"] in ("Paris", "Rome") for _, arguments in calls_of(whole))
    assert calls_of(whole)


def test_a_call_cut_off_by_the_limit_is_closed_json_t23():
    whole, chunks = ask(CALL, max_tokens=45)
    assert whole.finish_reason == "length"
    assert all(json.loads(arguments) is not None for _, arguments in calls_of(whole))
    assert rebuilt(chunks)[2] == ["length"]


def test_reasoning_before_a_call_is_kept_t13():
    whole, _ = ask(f"<think>hm</think>{CALL}", THINKING)
    assert whole.message.reasoning_content == "hm"
    assert calls_of(whole) == [("get_weather", '{"city": "Paris"}')]


@pytest.mark.parametrize("text", [CALL, '{"a": 1}'])
def test_tools_and_a_response_format_allow_either_t25(text):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    response_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    whole, _ = ask(text, response_format=response_format)
    if text == CALL:
        assert calls_of(whole) == [("get_weather", '{"city": "Paris"}')]
    else:
        assert json.loads(whole.message.content) == {"a": 1}


def test_text_before_a_call_is_content():
    whole, chunks = ask(f"Let me see.{CALL}")
    assert whole.message.content == "Let me see."
    assert rebuilt(chunks)[0] == "Let me see."

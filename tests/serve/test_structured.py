"""Structured output over HTTP."""

import json

import jsonschema
import openai
import pytest

from tests.serve.serving import EOS, MODEL, THINKING, serving, user


def ask(client, schema=None, **options):
    if schema is not None:
        options["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return client.chat.completions.create(model=MODEL, messages=user("hi"), max_tokens=200, **options).choices[0]


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("minItems", {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}),
        ("multipleOf", {"type": "integer", "multipleOf": 3, "minimum": 1, "maximum": 30}),
        ("uniqueItems", {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 2}),
        (
            "patternProperties",
            {"patternProperties": {"^a$": {"type": "boolean"}}, "additionalProperties": False, "type": "object"},
        ),
        ("enum", {"enum": ["x", 1]}),
        ("anyOf", {"anyOf": [{"type": "null"}, {"type": "boolean"}]}),
        ("$ref", {"$defs": {"n": {"type": "null"}}, "type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2}),
        ("additionalProperties", {"type": "object", "additionalProperties": False}),
        ("not", {"not": {"type": "string"}}),
    ],
)
def test_each_schema_keyword_is_enforced_or_refused_with_its_pointer_u42(keyword, schema):
    with serving([*b'}]"x', *b"]}" * 90]) as served:
        response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body = {"model": MODEL, "messages": user("hi"), "max_tokens": 200, "response_format": response_format}
        answer = served.post("/v1/chat/completions", body)
    if answer.status_code == 400:
        message = answer.json()["error"]["message"]
        assert "#" in message
        assert keyword in message
        return
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), schema)


def test_recursion_works_u42():
    schema = {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["next"],
        "additionalProperties": False,
    }
    text = b'{"next": {"next": null}}'
    with serving([*text, EOS]) as served:
        choice = ask(served.openai(), schema)
    assert json.loads(choice.message.content) == {"next": {"next": None}}


def test_json_object_bounds_white_space_u44():
    with serving([*b"{", *[10] * 30, *b"}", 10]) as served:
        choice = ask(served.openai(), response_format={"type": "json_object"})
    assert json.loads(choice.message.content) == {}
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"guided_choice": ["yes", "no"]}, ("yes", "no")),
        ({"guided_regex": "[0-9]{3}"}, ("000",)),
        ({"guided_json": {"const": 5}}, ("5",)),
        ({"guided_grammar": 'start: "ab"'}, ("ab",)),
        ({"structured_outputs": {"choice": ["a/b"]}}, ("a/b",)),
    ],
)
def test_guided_fields_hold_both_endpoints(fields, allowed):
    with serving("~~~~") as served:
        client = served.openai()
        assert ask(client, extra_body=fields).message.content in allowed
        plain = client.completions.create(model=MODEL, prompt="x", extra_body=fields)
        assert plain.choices[0].text in allowed


def test_content_is_held_behind_reasoning_too():
    script = [*THINKING.encode("<think>{no json</think>"), *b'{"a"', EOS]
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    with serving([*script[:-1], *b": true}", EOS], THINKING) as served:
        choice = ask(served.openai(), schema)
    assert choice.message.reasoning_content == "{no json"
    assert json.loads(choice.message.content) == {"a": True}


def test_two_constraints_at_once_are_refused():
    with serving("x") as served, pytest.raises(openai.BadRequestError, match="give one"):
        ask(served.openai(), {"type": "object"}, extra_body={"guided_regex": "a"})

"""Properties that hold for every format and every way of cutting the stream."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_rendering import parse, parser, render, run_ids, run_text

from trillion_infer.text.tools import TOOL_FORMATS, ToolCallStart, assemble

FORMATS = sorted(TOOL_FORMATS)
KEYS = ["city", "n", "opts", "flag", "text_2"]
NAMES = ["get_weather", "run-code", "f", "ns.tool_2"]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "n": {"type": ["number", "null"]},
        "opts": {"anyOf": [{"type": "object"}, {"type": "array"}]},
        "flag": {"type": "boolean"},
        "text_2": {"type": "string"},
    },
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES]

letters = st.characters(codec="utf-8", exclude_characters="<>｜", exclude_categories=["Cc", "Zl", "Zp", "Zs"])
words = st.text(letters, min_size=1, max_size=8)
texts = st.lists(words, min_size=1, max_size=4).map(" ".join)
numbers = st.integers(-(10**6), 10**6) | st.floats(-1e6, 1e6).map(lambda x: round(x, 3))
# Markup has no escapes, so that a value which holds its own end cannot be written.
MARKUP = ("qwen3_coder", "glm", "minimax", "deepseek_v32")


def call_lists(format):
    hard = "\"\\{}[](),:'\t 👍" if format in MARKUP else "\"\\{}[](),:'\t 👍<>"
    easy = st.characters(codec="utf-8", exclude_categories=["Cc"], exclude_characters="<>")
    strings = st.text(easy | st.sampled_from(hard), max_size=12)
    values = st.recursive(
        st.none() | st.booleans() | numbers | strings,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(strings, inner, max_size=3),
        max_leaves=6,
    )
    optional = {
        "city": strings,
        "n": numbers | st.none(),
        "opts": st.dictionaries(strings, values, max_size=3) | st.lists(values, max_size=3),
        "flag": st.booleans(),
        "text_2": strings,
    }
    arguments = st.fixed_dictionaries({}, optional=optional)
    return st.lists(st.tuples(st.sampled_from(NAMES), arguments), max_size=3)


@st.composite
def messages(draw, format):
    made = draw(call_lists(format))
    reasoning = draw(st.just("") | texts)
    content = draw(st.just("") | texts)
    if format in ("llama3", "llama4"):
        if made:
            content = ""
        elif content[:1] in ("{", "["):
            content = "x" + content
    return reasoning, content, made


def cut(sequence, sizes):
    pieces, at = [], 0
    for size in sizes:
        pieces.append(sequence[at : at + size])
        at += size
    return [*pieces, sequence[at:]]


def check(message, reasoning, content, made):
    assert message.reasoning == reasoning
    assert message.content == content
    assert [call.name for call in message.tool_calls] == [name for name, _ in made]
    assert [json.loads(call.arguments) for call in message.tool_calls] == [arguments for _, arguments in made]
    assert all(call.complete for call in message.tool_calls)
    assert len({call.id for call in message.tool_calls}) == len(made)


@pytest.mark.parametrize("format", FORMATS)
@given(data=st.data(), sizes=st.lists(st.integers(0, 9), max_size=60))
@settings(max_examples=30)
def test_a_written_message_is_read_back_from_any_cutting_of_its_text(format, data, sizes):
    reasoning, content, made = data.draw(messages(format))
    text = render(format, reasoning, content, made)
    events = run_text(parser(format, tools=TOOLS), cut(text, sizes))
    check(assemble(events), reasoning, content, made)


@pytest.mark.parametrize("format", FORMATS)
@given(data=st.data(), sizes=st.lists(st.integers(0, 9), max_size=60))
@settings(max_examples=30)
def test_a_written_message_is_read_back_from_any_cutting_of_its_tokens(marker_tokenizer, format, data, sizes):
    reasoning, content, made = data.draw(messages(format))
    ids = marker_tokenizer.encode(render(format, reasoning, content, made)) + list(marker_tokenizer.eos_ids)
    events = run_ids(parser(format, marker_tokenizer, TOOLS), cut(ids, sizes))
    check(assemble(events), reasoning, content, made)


@st.composite
def debris(draw, format):
    """Markers, pieces of well-formed output and noise, in any order."""
    calls = TOOL_FORMATS[format]
    whole = render(format, "why", "so", [("f", {"city": "a", "n": 1}), ("run-code", {})])
    start = draw(st.integers(0, len(whole)))
    pieces = st.sampled_from([*calls.markers, "<think>", "</think>", whole[start:], whole[:start], whole])
    return "".join(draw(st.lists(pieces | st.text('{}[]",:\\na1 \n()=f<>', max_size=8), max_size=8)))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", ["text", "tokens"])
@given(data=st.data(), sizes=st.lists(st.integers(0, 9), max_size=80))
@settings(max_examples=30)
def test_any_output_is_read_alike_from_every_cutting(marker_tokenizer, format, kind, data, sizes):
    text = data.draw(debris(format))
    if kind == "text":
        whole = assemble(run_text(parser(format), [text]))
        pieces = assemble(run_text(parser(format), cut(text, sizes)))
    else:
        ids = marker_tokenizer.encode(text)
        whole = assemble(run_ids(parser(format, marker_tokenizer), [ids]))
        pieces = assemble(run_ids(parser(format, marker_tokenizer), cut(ids, sizes)))
        added = marker_tokenizer.added_tokens
        spelled = re.sub("|".join(map(re.escape, added)), "", text)  # around one, text may spell another
        markers = [marker for marker in TOOL_FORMATS[format].markers if marker in added]
        leaked = [marker for marker in markers if whole.content.count(marker) > spelled.count(marker)]
        assert not leaked
    assert pieces == whole
    for call in whole.tool_calls:
        assert isinstance(json.loads(call.arguments), dict), call
    assert not any("\ud800" <= char <= "\udfff" for char in whole.content + whole.reasoning)


@pytest.mark.parametrize("format", FORMATS)
@given(data=st.data())
@settings(max_examples=30)
def test_a_truncated_message_has_closed_json_and_no_invented_call(format, data):
    reasoning, content, made = data.draw(messages(format))
    text = render(format, reasoning, content, made)
    message = parse(format, text[: data.draw(st.integers(0, len(text)))], tools=TOOLS)
    assert len(message.tool_calls) <= len(made)
    for call, (name, whole) in zip(message.tool_calls, made, strict=False):
        assert call.name == name
        found = json.loads(call.arguments)
        assert found.keys() <= whole.keys()
        assert not call.complete or found == whole


@pytest.mark.parametrize("format", FORMATS)
@given(data=st.data())
@settings(max_examples=30)
def test_a_name_comes_whole_and_once(format, data):
    reasoning, content, made = data.draw(messages(format))
    text = render(format, reasoning, content, made)
    starts = [e for e in run_text(parser(format, tools=TOOLS), list(text)) if isinstance(e, ToolCallStart)]
    assert [(e.index, e.name) for e in starts] == list(enumerate(name for name, _ in made))


@pytest.mark.parametrize("format", FORMATS)
def test_no_marker_lies_inside_another(format):
    markers = [*TOOL_FORMATS[format].markers, "<think>", "</think>"]
    inside = {(a, b) for a in markers for b in markers if a != b and a in b}
    assert not inside

"""One test for each known way in which parsers of this kind fail."""

import json

import pytest
from tool_rendering import THINK, call_id, parse, parser, render, render_calls, run_ids, run_text

from trillion_infer.core.errors import InvalidRequestError
from trillion_infer.text import StopMatcher, Tokenizer
from trillion_infer.text.tools import (
    TOOL_FORMATS,
    ArgumentsDelta,
    ContentDelta,
    OutputParser,
    ToolCall,
    ToolCallStart,
    assemble,
    detect_reasoning_format,
    detect_tool_format,
    opens_reasoning,
    tool_format,
)

FORMATS = sorted(TOOL_FORMATS)
TWO = [("get_weather", {"city": "서울"}), ("run-code", {"n": 2})]


def tool(name, **types):
    properties = {key: {"type": kind} for key, kind in types.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def arguments(message):
    return [json.loads(call.arguments) for call in message.tool_calls]


@pytest.mark.parametrize("format", FORMATS)
def test_t08_end_of_one_call_and_begin_of_the_next_in_one_delta(format):
    message = parse(format, render_calls(format, TWO))
    assert arguments(message) == [{"city": "서울"}, {"n": 2}]


def test_t09_kimi_markers_never_reach_the_content(marker_tokenizer):
    stray = "<|tool_call_end|>a<|tool_calls_section_end|>b<|tool_call_argument_begin|>c<|tool_calls_section_begin|>d"
    message = assemble(run_ids(parser("kimi_k2", marker_tokenizer), [[i] for i in marker_tokenizer.encode(stray)]))
    assert message.content == "abcd"


@pytest.mark.parametrize("format", [f for f in FORMATS if f not in ("llama3", "llama4", "harmony")])
def test_t10_white_space_around_calls_is_no_content(format):
    message = parse(format, f"Let me see. \n\n{render_calls(format, TWO)}\n \n")
    assert message.content == "Let me see."
    assert len(message.tool_calls) == 2


@pytest.mark.parametrize("format", FORMATS)
def test_t11_names_with_dashes_are_accepted(format):
    assert [call.name for call in parse(format, render_calls(format, TWO)).tool_calls] == ["get_weather", "run-code"]


@pytest.mark.parametrize("format", FORMATS)
def test_t13_end_of_reasoning_and_start_of_a_call_in_one_delta(format):
    message = parse(format, render(format, "hm, tools", "", TWO))
    assert message.reasoning == "hm, tools"
    assert len(message.tool_calls) == 2


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("step", [2, 5, 17])
def test_t14_the_first_calls_arguments_survive_steps_of_many_tokens(marker_tokenizer, format, step):
    ids = marker_tokenizer.encode(render_calls(format, TWO))
    pieces = [ids[at : at + step] for at in range(0, len(ids), step)]
    assert arguments(assemble(run_ids(parser(format, marker_tokenizer), pieces))) == [{"city": "서울"}, {"n": 2}]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("no markers at all", "no markers at all"),
        ("<|channel|>final<|message|>half", "half"),
        ("<|channel|>unheard<|message|>of", "unheardof"),
        ("<|channel|>commentary<|message|>preamble<|end|><|start|>assistant<|channel|>final", "preamblefinal"),
        ("<|message|>bare<|end|>", "bare"),
        ("x" * 2000 + "<|message|>y", "x" * 2000 + "<|message|>y"),
        ("<|channel|>commentary to=?!<|message|>text<|end|>", "text"),
    ],
)
def test_t16_a_malformed_harmony_message_is_text(text, content):
    message = parse("harmony", text)
    assert message.content == content
    assert not message.tool_calls


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.f <|constrain|>json",
        "<|channel|>commentary to=functions.f<|constrain|>json",
        " to=functions.f<|channel|>commentary <|constrain|>json",
        " to=functions.f<|channel|>commentary json",
        "<|channel|>analysis to=functions.f code",
    ],
)
def test_harmony_recipients_stand_on_either_side_of_the_channel(marker_tokenizer, header):
    text = header + '<|message|>{"a": 1}<|call|>'
    for message in (
        parse("harmony", text),
        assemble(run_ids(parser("harmony", marker_tokenizer), [marker_tokenizer.encode(text)])),
    ):
        assert message.tool_calls == [ToolCall("call_0", "f", '{"a": 1}', True)]
        assert message.content == ""


@pytest.mark.parametrize("format", FORMATS)
def test_t18_the_name_is_streamed_whole(format):
    events = run_text(parser(format), list(render_calls(format, TWO)))
    assert [e.name for e in events if isinstance(e, ToolCallStart)] == ["get_weather", "run-code"]


@pytest.mark.parametrize("name", ["null", '""', "3", '"a b"'])
def test_t20_a_call_without_a_name_is_no_call(name):
    message = parse("hermes", f'<tool_call>{{"name": {name}, "arguments": {{"a": 1}}}}</tool_call>')
    assert message.tool_calls == []
    assert '"arguments": {"a": 1}' in message.content


def test_t20_arguments_before_the_name_come_once():
    events = run_text(parser("hermes"), list('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>'))
    assert [e.text for e in events if isinstance(e, ArgumentsDelta)] == ['{"a": 1}']
    assert assemble(events).tool_calls == [ToolCall("call_0", "f", '{"a": 1}', True)]


def test_t21_markup_does_not_leak_into_arguments():
    text = "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>"
    assert arguments(parse("qwen3_coder", text)) == [{"a": "x"}]
    text = '<minimax:tool_call><invoke name="f"><parameter name="a">x</parameter></invoke></minimax:tool_call>'
    assert arguments(parse("minimax", text)) == [{"a": "x"}]


@pytest.mark.parametrize("kind", ["string", "integer"])
@pytest.mark.parametrize("format", ["qwen3_coder", "glm", "minimax", "deepseek_v32"])
def test_t23_a_malformed_parameter_leaves_closed_json(marker_tokenizer, format, kind):
    text = render_calls(format, [("f", {"a": "1"})])
    calls = TOOL_FORMATS[format]
    broken = text.replace(calls.param_end, "", 1) + "after"
    parsed = run_ids(parser(format, marker_tokenizer, [tool("f", a=kind)]), [marker_tokenizer.encode(broken)])
    call = assemble(parsed).tool_calls[0]
    assert json.loads(call.arguments).keys() <= {"a"}
    assert not call.complete


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('{"a": 1,}', {"a": 1}),
        ('{"a": True, "b": None}', {"a": True, "b": None}),
        ('{"a": "line\nbreak\ttab"}', {"a": "line\nbreak\ttab"}),
        (r'{"a": "\d+\."}', {"a": "\\d+\\."}),
        (r'{"a": "\ud83d\ude00 \ud83d x \ude00"}', {"a": "😀 \ufffd x \ufffd"}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ("", {}),
        ("null", {}),
        ('{"a": [1, {"b": [[], {}]}]}', {"a": [1, {"b": [[], {}]}]}),
    ],
)
def test_arguments_that_models_write_are_mended(written, read):
    text = f"<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{written}<|tool_call_end|>"
    message = parse("kimi_k2", text)
    assert arguments(message) == [read]
    assert message.tool_calls[0].complete


@pytest.mark.parametrize(
    ("written", "closed"),
    [
        ('{"a": "hal', '{"a": "hal"}'),
        ('{"a": "x\\', '{"a": "x"}'),
        ('{"a": "x\\u12', '{"a": "x"}'),
        ('{"a": 1, "b', '{"a": 1}'),
        ('{"a": 12', "{}"),
        ('{"a": [1, [2, {"c": "d', '{"a": [1, [2, {"c": "d"}]]}'),
        ('{"a": tru', "{}"),
        ("{", "{}"),
        ("", "{}"),
        ("[1", "{}"),
        ("{'a': 1}", "{}"),
        ('{"a": 1 "b": 2}', '{"a": 1}'),
    ],
)
def test_a_cut_off_call_is_closed_where_it_can_be(written, closed):
    message = parse("kimi_k2", f"<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{written}")
    assert message.tool_calls == [ToolCall("functions.f:0", "f", closed, False)]


def test_deep_nesting_is_no_recursion():
    deep = '{"a": ' + "[" * 5000 + "]" * 5000 + "}"
    text = f"<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{deep}<|tool_call_end|>"
    assert parse("kimi_k2", text).tool_calls[0].arguments == deep


@pytest.mark.parametrize(
    ("header", "first_call", "id"),
    [
        ("functions.f:3", 0, "functions.f:3"),
        ("functions.f:3", 3, "functions.f:3"),
        ("functions.f:0", 3, "functions.f:3"),
        ("f:1", 0, "functions.f:1"),
        ("functions.f", 4, "functions.f:4"),
        (" functions.ns.f-2:0 ", 0, "functions.ns.f-2:0"),
    ],
)
def test_kimi_ids_are_normalised(header, first_call, id):
    text = f"<|tool_call_begin|>{header}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    call = parse("kimi_k2", text, first_call=first_call).tool_calls[0]
    assert call.id == id
    assert call.id.removeprefix("functions.").rpartition(":")[0] == call.name


@pytest.mark.parametrize("format", [f for f in FORMATS if f not in ("harmony", "kimi_k2")])
def test_markers_inside_reasoning_are_only_mentioned(marker_tokenizer, format):
    thought = f"I could write {render_calls(format, TWO)} here"
    text = f"<think>{thought}</think>done"
    ids = marker_tokenizer.encode(text)
    for message in (parse(format, text), assemble(run_ids(parser(format, marker_tokenizer), [ids]))):
        assert message.reasoning == thought
        assert message.content == "done"
        assert message.tool_calls == []


def test_a_kimi_section_ends_the_reasoning():
    message = parse("kimi_k2", "<think>so I call " + render_calls("kimi_k2", TWO))
    assert message.reasoning == "so I call"
    assert len(message.tool_calls) == 2


@pytest.mark.parametrize("format", ["hermes", "kimi_k2", "deepseek_v31", "llama3", "harmony"])
def test_markers_inside_json_strings_are_text(format):
    made = [("f", {"city": " and ".join(["<think>", "</think>", *TOOL_FORMATS[format].markers])})]
    assert arguments(parse(format, render_calls(format, made))) == [made[0][1]]


def test_marker_tokens_inside_json_strings_are_text_where_the_family_allows(marker_tokenizer):
    made = [("f", {"city": "<tool_call></tool_call>"})]
    ids = marker_tokenizer.encode(render_calls("hermes", made))
    assert arguments(assemble(run_ids(parser("hermes", marker_tokenizer), [ids]))) == [made[0][1]]


def test_a_marker_spelled_by_ordinary_tokens_is_text(marker_tokenizer):
    spelled = [id for char in "<tool_call>" for id in marker_tokenizer.encode(char)]
    message = assemble(run_ids(parser("hermes", marker_tokenizer), [spelled]))
    assert message.content == "<tool_call>"


def test_a_prompt_may_have_opened_the_reasoning():
    assert opens_reasoning("<|assistant|><think>\n", THINK)
    assert not opens_reasoning("<|assistant|><think>\n</think>\n", THINK)
    assert not opens_reasoning("<think>", None)
    message = parse("hermes", "why\n</think>\n\nanswer", in_reasoning=True)
    assert (message.reasoning, message.content) == ("why", "answer")


def test_reasoning_without_an_end_is_reasoning():
    message = parse("hermes", "<think>never done ")
    assert (message.reasoning, message.content) == ("never done", "")


def test_u38_without_tools_nothing_is_a_call(marker_tokenizer):
    ids = marker_tokenizer.encode(render("hermes", "why", "so", TWO))
    stream = OutputParser(marker_tokenizer, None, THINK, new_id=call_id)
    message = assemble(run_ids(stream, [ids]))
    assert message.tool_calls == []
    assert message.reasoning == "why"
    assert stream.calls_made == 0


def test_bare_json_that_is_no_offered_tool_is_content():
    for text in ('{"name": "Ann", "parameters": {}}', '{"answer": 4}', "[1, 2]", "{broken"):
        message = parse("llama3", text, tools=[tool("f")])
        assert (message.content, message.tool_calls) == (text, [])
    for text in ("[1, 2]", "[Ann(a=1)]", "[f(a=open())]", "[f(a=1", "[see](http://x)"):
        message = parse("llama4", text, tools=[tool("f")])
        assert message.content == ("" if text == "[f(a=1" else text)


def test_python_tag_and_python_start_announce_calls():
    call = [ToolCall("call_0", "f", '{"a": 1}', True)]
    assert parse("llama3", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}').tool_calls == call
    assert parse("llama4", "<|python_start|>[f(a=1)]<|python_end|>").tool_calls == call
    positional = parse("llama4", "[f(1)]", tools=[tool("f", a="integer")])
    assert positional.tool_calls == call


@pytest.mark.parametrize(
    ("kind", "written", "read"),
    [
        ("string", "5", "5"),
        ("string", '{"a": 1}', '{"a": 1}'),
        ("integer", "5", 5),
        ("integer", "five", "five"),
        ("boolean", "True", True),
        ("object", "{'a': None}", {"a": None}),
        ("array", '["x"]', ["x"]),
        (["string", "null"], "null", None),
        (["string", "null"], "5", "5"),
        (None, "5", 5),
        (None, "plain", "plain"),
    ],
)
def test_a_parameters_type_comes_from_the_schema(kind, written, read):
    tools = None if kind is None else [tool("f", a=kind)]
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{written}\n</parameter>\n</function>\n</tool_call>"
    assert arguments(parse("qwen3_coder", text, tools=tools)) == [{"a": read}]


def test_a_long_string_parameter_streams():
    stream = parser("qwen3_coder", tools=[tool("f", code="string")])
    stream.push_text("<tool_call>\n<function=f>\n<parameter=code>\n")
    assert stream.push_text("line one\nline") == [ArgumentsDelta(0, "line one\\nline")]


def test_a_stop_string_cuts_before_the_reading():
    stream = OutputParser(None, tool_format("hermes"), stop=StopMatcher(("STOP",)))
    events = run_text(stream, ["some ST", "OP<tool_call>"])
    assert events == [ContentDelta("some"), ContentDelta(" ")]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<|tool_calls_section_begin|>' }}", "kimi_k2"),
        ("<｜tool▁calls▁begin｜> ```json", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v31"),
        ("<｜DSML｜function_calls>", "deepseek_v32"),
        ("<tool_call>", "hermes"),
        ("<tool_call><function=", "qwen3_coder"),
        ("<tool_call><arg_key>", "glm"),
        ("<minimax:tool_call>", "minimax"),
        ("<|channel|>", "harmony"),
        ("<|python_start|>", "llama4"),
        ("<|python_tag|>", "llama3"),
        ("plain", None),
    ],
)
def test_the_chat_template_tells_the_format(byte_metadata, template, name):
    tokenizer = Tokenizer.from_gguf({**byte_metadata, "tokenizer.chat_template": template})
    assert detect_tool_format(tokenizer) == name


def test_reasoning_is_told_by_tokens_or_template(byte_metadata):
    plain = Tokenizer.from_gguf(byte_metadata)
    assert detect_reasoning_format(plain) is None
    told = Tokenizer.from_gguf({**byte_metadata, "tokenizer.chat_template": "{{ m.split('</think>') }}"})
    assert detect_reasoning_format(told) == "think"


def test_an_unknown_format_lists_the_known_ones():
    with pytest.raises(InvalidRequestError, match="kimi_k2"):
        tool_format("morse")

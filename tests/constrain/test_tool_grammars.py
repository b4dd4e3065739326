"""Messages drawn under the grammar of each tool format are read back by its parser as valid calls."""

import json

import jsonschema
import pytest
from random_model import write

from trillion_infer.constrain import schema_rule
from trillion_infer.constrain.call_shapes import CALL_SHAPES
from trillion_infer.constrain.envelope import Reasoning, message_grammar
from trillion_infer.core.errors import InvalidRequestError
from trillion_infer.text.tools import REASONING_FORMATS, TOOL_FORMATS, OutputParser, assemble

FORMATS = sorted(CALL_SHAPES)
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Seoul", "Brno"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "opts": {"type": "object", "properties": {"x": {"type": "boolean"}}, "additionalProperties": False},
    },
    "required": ["city"],
    "additionalProperties": False,
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"get_weather": WEATHER, "run-code": EMPTY}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
THINK = REASONING_FORMATS["think"]
SEEDS = range(6)


def read(format, text, **options):
    reasoning = None if format == "harmony" else THINK
    parser = OutputParser(None, TOOL_FORMATS[format], reasoning, tools=TOOLS, **options)
    return assemble(parser.push_text(text) + parser.finish())


def check_calls(message):
    for call in message.tool_calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


def draw(compiler, tokenizer, seed, **options):
    grammar = message_grammar(tokenizer.added_tokens, tools=TOOLS, **options)
    text = write(compiler.compile(grammar), tokenizer, seed, wander=60, limit=2000)
    assert text is not None
    return text


def test_every_tool_format_can_be_constrained():
    assert CALL_SHAPES.keys() == TOOL_FORMATS.keys()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("format", FORMATS)
def test_u37_required_calls_are_valid(compiler, byte_tokenizer, format, seed):
    text = draw(compiler, byte_tokenizer, seed, format=format, choice="required")
    message = read(format, text)
    assert message.tool_calls, text
    assert message.content == ""
    check_calls(message)
    assert all(call.complete for call in message.tool_calls) or format == "harmony"


@pytest.mark.parametrize("format", ["deepseek_v32", "glm", "minimax", "qwen3_coder"])
def test_a_text_parameter_is_free_up_to_its_end(compiler, byte_tokenizer, format):
    note = {"type": "object", "properties": {"note": {"type": "string"}}, "required": ["note"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": note}}]
    shape = CALL_SHAPES[format]
    parameter = shape.parameter.replace("{key}", "note").replace("{flag}", "true").replace("{value}", 'a <b>\n"c')
    text = shape.begin + shape.before.replace("{name}", "f") + parameter + shape.after + shape.end
    grammar = message_grammar(byte_tokenizer.added_tokens, tools=tools, format=format, choice="f")
    state = compiler.compile(grammar)
    ids = byte_tokenizer.encode(text)
    assert state.accept(ids) == len(ids)
    assert state.may_end
    assert json.loads(read(format, text).tool_calls[0].arguments) == {"note": 'a <b>\n"c'}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", SCHEMAS)
def test_u37_a_named_tool_is_the_only_one_called(compiler, byte_tokenizer, format, name):
    for seed in SEEDS:
        text = draw(compiler, byte_tokenizer, seed, format=format, choice=name, parallel=False)
        assert [call.name for call in read(format, text).tool_calls] == [name]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("format", FORMATS)
def test_auto_calls_are_valid_too(compiler, byte_tokenizer, format, seed):
    grammar = message_grammar(byte_tokenizer.added_tokens, tools=TOOLS, format=format)
    required = message_grammar(byte_tokenizer.added_tokens, tools=TOOLS, format=format, choice="required")
    call = write(compiler.compile(required), byte_tokenizer, seed, wander=60, limit=2000)
    begin = "" if CALL_SHAPES[format].bare or format == "harmony" else "Let me look."
    plain = "<|channel|>final<|message|>Plain text" if format == "harmony" else "Plain text"
    for text, calls in ((f"{begin}{call}", True), (plain, False)):
        state = compiler.compile(grammar)
        ids = byte_tokenizer.encode(text)
        assert state.accept(ids) == len(ids), text
        assert state.may_end
        assert bool(read(format, text).tool_calls) is calls


@pytest.mark.parametrize("format", [f for f in FORMATS if not CALL_SHAPES[f].bare and f != "harmony"])
def test_an_auto_call_to_an_unknown_tool_is_impossible(compiler, byte_tokenizer, format):
    grammar = message_grammar(byte_tokenizer.added_tokens, tools=TOOLS, format=format)
    shape = CALL_SHAPES[format]
    text = "Well. " + shape.begin + shape.before.replace("{name}", "unknown").replace("\0", "").replace("{index}", "0")
    ids = byte_tokenizer.encode(text)
    assert compiler.compile(grammar).accept(ids) < len(ids)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("is_open", [True, False])
def test_reasoning_comes_first_and_is_free(compiler, byte_tokenizer, is_open, seed):
    reasoning = Reasoning(THINK.open, THINK.close, is_open)
    lead = "so {free} it <is>\n" if is_open else "<think>so {free} it <is>\n"
    grammar = message_grammar(byte_tokenizer.added_tokens, reasoning=reasoning, content=schema_rule(WEATHER))
    state = compiler.compile(grammar)
    ids = byte_tokenizer.encode(lead + "</think>")
    assert state.accept(ids) == len(ids)
    body = write(state, byte_tokenizer, seed)
    jsonschema.validate(json.loads(body), WEATHER)


def test_t02_the_grammar_holds_from_the_token_that_ends_the_reasoning(compiler, byte_tokenizer):
    grammar = message_grammar(
        byte_tokenizer.added_tokens, reasoning=Reasoning("<think>", "</think>", True), content=schema_rule(WEATHER)
    )
    state = compiler.compile(grammar)
    assert state.accept(byte_tokenizer.encode("hm</think>") + byte_tokenizer.encode("no JSON")) == 3


@pytest.mark.parametrize("format", FORMATS)
def test_t25_auto_tools_and_a_response_format_allow_either(compiler, byte_tokenizer, format):
    answer = schema_rule({"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]})
    options = {"tools": TOOLS, "format": format, "parallel": False}
    either = message_grammar(byte_tokenizer.added_tokens, content=answer, **options)
    call = write(
        compiler.compile(message_grammar(byte_tokenizer.added_tokens, choice="run-code", **options)), byte_tokenizer, 0
    )
    lead = "<|channel|>final <|constrain|>json<|message|>" if format == "harmony" else ""
    for text in (call, lead + '{"answer": 42}'):
        state = compiler.compile(either)
        ids = byte_tokenizer.encode(text)
        assert state.accept(ids) == len(ids), text
        assert state.may_end
    ids = byte_tokenizer.encode("neither")
    assert compiler.compile(either).accept(ids) == 0


def test_u37_an_unknown_choice_lists_the_tools(byte_tokenizer):
    with pytest.raises(InvalidRequestError, match=r"'fly'.*get_weather, run-code"):
        message_grammar(byte_tokenizer.added_tokens, format="hermes", tools=TOOLS, choice="fly")


def test_an_unknown_format_lists_the_formats(byte_tokenizer):
    with pytest.raises(InvalidRequestError, match=r"'morse'.*kimi_k2"):
        message_grammar(byte_tokenizer.added_tokens, format="morse", tools=TOOLS)


def test_choice_none_leaves_the_text_free(compiler, byte_tokenizer):
    grammar = message_grammar(byte_tokenizer.added_tokens, format="hermes", tools=TOOLS, choice="none")
    state = compiler.compile(grammar)
    ids = byte_tokenizer.encode("anything {[")
    assert state.accept(ids) == len(ids)
    assert byte_tokenizer.added_tokens["<tool_call>"] not in state.forced_tokens()
    assert state.accept([byte_tokenizer.added_tokens["<tool_call>"]]) == 0

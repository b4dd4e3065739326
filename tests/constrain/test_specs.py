"""What each kind of structured output allows, and what is refused."""

import json

import numpy as np
import pytest
from random_model import allowed, write

from trillion_infer.constrain import GrammarCompiler, compile_grammar
from trillion_infer.core.errors import ConfigError, InvalidRequestError
from trillion_infer.core.sampling_params import StructuredOutput


def texts(state, tokenizer):
    """Spellings of the allowed tokens."""
    return {tokenizer.id_to_bytes(int(id)) for id in allowed(state, tokenizer.vocab_size)}


@pytest.mark.parametrize("seed", range(10))
def test_a_regex_holds(compiler, byte_tokenizer, seed):
    text = write(compiler.compile(StructuredOutput(regex=r"a[0-9]{2,4}(b|cc)+")), byte_tokenizer, seed)
    import re

    assert re.fullmatch(r"a[0-9]{2,4}(b|cc)+", text)


HARD = ['say "hi"', "back\\slash", "new\nline", "emoji 👍", "a/b", "<think>", "{x}"]


@pytest.mark.parametrize("text", HARD)
def test_every_choice_can_be_written_and_nothing_else(compiler, byte_tokenizer, text):
    spec = StructuredOutput(choice=tuple(HARD))
    ids = [id for byte in text.encode() for id in [byte_id(byte_tokenizer, byte)]]
    state = compiler.compile(spec)
    assert state.accept(ids) == len(ids)
    assert state.is_complete
    assert write(compiler.compile(spec), byte_tokenizer, seed=1) in HARD


def byte_id(tokenizer, byte):
    return next(id for id in range(256) if tokenizer.id_to_bytes(id) == bytes([byte]))


def test_a_lark_grammar_holds(compiler, byte_tokenizer):
    spec = StructuredOutput(grammar='start: "x" ("," item)*\nitem: /[0-9]+/')
    for seed in range(5):
        text = write(compiler.compile(spec), byte_tokenizer, seed)
        assert text.startswith("x")
        assert all(item.isdigit() for item in text.split(",")[1:])


def test_an_ebnf_grammar_is_converted(compiler, byte_tokenizer):
    spec = StructuredOutput(grammar='root ::= "yes" | "no"')
    assert write(compiler.compile(spec), byte_tokenizer, 0) in ("yes", "no")


@pytest.mark.parametrize("seed", range(10))
def test_u44_json_object_ends_and_parses(compiler, byte_tokenizer, seed):
    text = write(compiler.compile(StructuredOutput(json_object=True)), byte_tokenizer, seed)
    assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize("lead", ["{", '{"a":', '{"a": 1', '{"a": 1,', '{"a": [1'])
def test_u44_white_space_is_bounded(compiler, byte_tokenizer, lead):
    state = compiler.compile(StructuredOutput(json_object=True))
    assert state.accept(byte_tokenizer.encode(lead)) > 0
    newline, space = byte_tokenizer.encode("\n")[0], byte_tokenizer.encode(" ")[0]
    assert state.accept([newline] * 50) <= 1
    assert state.accept([space] * 100) <= 40


def test_u44_pretty_printed_json_is_allowed(compiler, byte_tokenizer):
    state = compiler.compile(StructuredOutput(json_object=True))
    ids = byte_tokenizer.encode(json.dumps({"a": [1, {"b": "c"}], "d": None}, indent=2))
    assert state.accept(ids) == len(ids)


def test_u44_only_the_end_follows_the_closed_value(compiler, byte_tokenizer):
    state = compiler.compile(StructuredOutput(json_object=True))
    state.accept(byte_tokenizer.encode('{"a": 1}'))
    assert state.is_complete
    assert set(allowed(state, byte_tokenizer.vocab_size).tolist()) == byte_tokenizer.eos_ids


NEEDS_A = {"type": "object", "required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"type": "array", "uniqueItems": True}, "#/uniqueItems"),
        ({"properties": {"a/b": {"contains": {}}}}, "#/properties/a~1b/contains"),
        ({"anyOf": [{"type": "integer"}, {"not": {}}]}, "#/anyOf/1/not"),
        ({"items": {"if": {}}}, "#/items/if"),
        ({"$defs": {"x": {"dependentRequired": {}}}, "$ref": "#/$defs/x"}, "#/$defs/x/dependentRequired"),
        ({"properties": {"m": {"type": "string", "format": "regex"}}}, "#/properties/m/format"),
        ({"propertyNames": {}}, "#/propertyNames"),
        ({"nullable": True}, "#/nullable"),
        ({"x-guidance": {}}, "#/x-guidance"),
        ({"typo": 1}, "#/typo"),
        ({"items": [{}]}, "#/items"),
        ({"properties": []}, "#/properties"),
        ({"properties": {"a": 3}}, "#/properties/a"),
        ({"anyOf": {}}, "#/anyOf"),
        ({"properties": {"a": {"type": "string", "pattern": "(?=x)y"}}}, "#/properties/a"),
        ({"properties": {"a": {"minimum": 3, "maximum": 2, "type": "number"}}, **NEEDS_A}, "#/properties/a"),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "#/properties/a"),
        ({"properties": {"a": {"$ref": "http://example.com/s.json"}}}, "#/properties/a"),
        ({"items": {"type": "dog"}}, "#/items"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "#"),
        (False, "#"),
        ("{nonsense", "not valid JSON"),
        ([1], "#"),
    ],
)
def test_u42_what_cannot_be_enforced_is_refused_by_its_pointer(compiler, schema, pointer):
    text = schema if isinstance(schema, str) else json.dumps(schema)
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(StructuredOutput(json_schema=text))
    assert f"{pointer}:" in str(caught.value) or pointer in str(caught.value).split(":")[0]


def test_annotations_change_nothing(compiler, byte_tokenizer):
    schema = {"type": "integer", "title": "T", "description": "d", "default": 3, "x-order": 1, "uniqueItems": False}
    text = write(compiler.compile(StructuredOutput(json_schema=schema)), byte_tokenizer, 0)
    assert isinstance(json.loads(text), int)


@pytest.mark.parametrize(
    ("spec", "param"),
    [
        (StructuredOutput(regex="(a"), "regex"),
        (StructuredOutput(regex="(?=a)b"), "regex"),
        (StructuredOutput(grammar="start: missing"), "grammar"),
        (StructuredOutput(grammar="%%%"), "grammar"),
        (StructuredOutput(choice=()), "choice"),
        (StructuredOutput(choice=("",)), "choice"),
    ],
)
def test_what_cannot_be_compiled_names_its_parameter(compiler, spec, param):
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(spec)
    assert caught.value.param == param


def test_special_tokens_never_stand_for_their_spelling(compiler, byte_tokenizer):
    state = compiler.compile(StructuredOutput(regex="<think>"))
    assert byte_tokenizer.added_tokens["<think>"] not in allowed(state, byte_tokenizer.vocab_size)


def test_a_vocabulary_without_an_end_is_refused(byte_tokenizer):
    class Endless:
        def __getattr__(self, name):
            return frozenset() if name == "eos_ids" else getattr(byte_tokenizer, name)

    with pytest.raises(ConfigError, match="no end-of-sequence"):
        GrammarCompiler(Endless())


def test_one_call_compiles_for_one_use(byte_tokenizer):
    assert write(compile_grammar(StructuredOutput(choice=("a",)), byte_tokenizer), byte_tokenizer, 0) == "a"


def test_states_of_one_grammar_are_independent(compiler, byte_tokenizer):
    spec = StructuredOutput(choice=("ab", "cd"))
    first, second = compiler.compile(spec), compiler.compile(spec)
    first.accept(byte_tokenizer.encode("a"))
    assert texts(second, byte_tokenizer) == {b"a", b"c"}


def test_the_mask_is_zero_beyond_the_vocabulary(compiler, byte_tokenizer):
    state = compiler.compile(StructuredOutput(regex="[a-z]*"))
    out = np.full(100, 0xFFFFFFFF, np.uint32)
    state.mask(out)
    bits = np.unpackbits(out.view(np.uint8), bitorder="little")
    assert not bits[byte_tokenizer.vocab_size :].any()
    assert bits[: byte_tokenizer.vocab_size].any()

"""Tools with schemas beyond what can be enforced stay usable."""

import json

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_model import write

from trillion_infer.constrain.call_shapes import CALL_SHAPES
from trillion_infer.constrain.envelope import message_grammar
from trillion_infer.constrain.relax import relax_schema
from trillion_infer.core.errors import InvalidRequestError
from trillion_infer.core.sampling_params import StructuredOutput

ODD = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {
        "url": {"type": "string", "format": "uri-reference"},
        "tags": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        "mode": {"oneOf": [{"const": 1}, {"minimum": 0, "type": "integer"}]},
        "code": {"type": "string", "pattern": "^(?!x)[a-z]+$"},
        "node": {"$ref": "#/$defs/node"},
        "far": {"$ref": "http://example.org/far.json"},
        "pair": {"items": [{"type": "integer"}]},
        "wild": {"type": "whatever", "minLength": "3"},
    },
    "required": ["tags", "node"],
    "propertyNames": {"minLength": 1},
    "$defs": {"node": {"type": "object", "properties": {"n": {"not": {"const": 0}}}, "additionalProperties": False}},
}
VALID = [
    {"tags": [1, 2], "node": {}},
    {"url": "../a", "tags": [], "mode": 3, "code": "abc", "node": {"n": 2}, "far": [1], "pair": [4, "x"], "wild": None},
]


@pytest.mark.parametrize("value", VALID)
def test_everything_valid_stays_allowed(compiler, byte_tokenizer, value):
    state = compiler.compile(StructuredOutput(json_schema=relax_schema(ODD)))
    ids = byte_tokenizer.encode(json.dumps(value))
    assert state.accept(ids) == len(ids)


@pytest.mark.parametrize(
    "value", [{"tags": ["x"], "node": {}}, {"node": {}, "tags": []}, {"tags": [], "node": {"m": 1}}]
)
def test_what_can_be_enforced_still_is(compiler, byte_tokenizer, value):
    state = compiler.compile(StructuredOutput(json_schema=relax_schema(ODD)))
    ids = byte_tokenizer.encode(json.dumps(value))
    assert state.accept(ids) < len(ids)


@pytest.mark.parametrize("format", CALL_SHAPES)
def test_every_format_takes_an_odd_tool_and_refuses_a_strict_one(compiler, byte_tokenizer, format):
    function = {"name": "f", "parameters": ODD}
    options = {"format": format, "choice": "f"}
    loose = message_grammar(byte_tokenizer.added_tokens, tools=[{"function": function}], **options)
    assert compiler.compile(loose).accept([]) == 0
    strict = [{"function": {**function, "strict": True}}]
    with pytest.raises(InvalidRequestError, match="json_schema at #"):
        message_grammar(byte_tokenizer.added_tokens, tools=strict, **options)


@pytest.mark.parametrize("format", CALL_SHAPES)
@pytest.mark.parametrize(
    "function", [{"name": "f"}, {"name": "f", "parameters": {}}, {"name": "f", "parameters": None}]
)
def test_a_tool_without_parameters_can_be_called(compiler, byte_tokenizer, format, function):
    grammar = message_grammar(byte_tokenizer.added_tokens, tools=[function], format=format, choice="required")
    assert write(compiler.compile(grammar), byte_tokenizer, seed=2, limit=2000)


junk = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["string", "object", "#", "#/x", "(", "date"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                "type enum const anyOf oneOf allOf $ref properties required additionalProperties patternProperties "
                "items prefixItems minItems maxItems minLength pattern format minimum multipleOf not if $defs".split()
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


@given(schema=junk)
def test_any_junk_relaxes_to_a_schema_that_the_checker_takes(schema):
    from trillion_infer.constrain.schema import parse_schema

    relaxed = relax_schema(schema)
    if relaxed is not False:
        jsonschema.Draft202012Validator.check_schema(parse_schema(relaxed))

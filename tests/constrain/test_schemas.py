"""JSON schemas: whatever is drawn under the mask validates, and what is valid (in the schema's key order) can be drawn.

Hypothesis makes several hundred schemas of every enforced keyword, each with an instance valid by construction.
"""

import json

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_model import write

from trillion_infer.core.sampling_params import StructuredOutput

PATTERNS = {
    "^a+b$": "aab",
    "^[A-Z]{2}-[0-9]{3}$": "AB-123",
    "^(yes|no)$": "no",
    "x": "axb",
    "^[^a]*$": "xyz",
    r"^\d+(\.\d+)?$": "12.5",
}
FORMATS = {
    "date": "2024-02-29",
    "time": "12:30:00Z",
    "date-time": "2024-02-29T12:30:00Z",
    "duration": "P3D",
    "email": "ada@example.org",
    "hostname": "example.org",
    "ipv4": "10.0.0.1",
    "ipv6": "::1",
    "uri": "https://example.org/a?b=c",
    "uuid": "123e4567-e89b-42d3-a456-426614174000",
}
KEYS = ["a", "name", "x y", "ключ", 'q"uote']
# No "<": the test encodes the document, and a spelled special token would become that token.
texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"], exclude_characters="<"), max_size=8)


@st.composite
def integers(draw):
    value, schema = draw(st.integers(-1000, 1000)), {"type": "integer"}
    if draw(st.booleans()):
        schema[draw(st.sampled_from(["minimum", "exclusiveMinimum"]))] = value - draw(st.integers(1, 50))
    if draw(st.booleans()):
        schema[draw(st.sampled_from(["maximum", "exclusiveMaximum"]))] = value + draw(st.integers(1, 50))
    return schema, value


@st.composite
def multiples(draw):
    step = draw(st.sampled_from([2, 3, 5, 10]))
    return {"type": "integer", "multipleOf": step}, step * draw(st.integers(0, 40))


@st.composite
def floats(draw):
    value, schema = draw(st.integers(-8000, 8000)) / 8, {"type": "number"}
    if draw(st.booleans()):
        schema["minimum"] = value - draw(st.integers(0, 9)) / 4
    if draw(st.booleans()):
        schema["exclusiveMaximum"] = value + draw(st.integers(1, 9)) / 4
    return schema, value


@st.composite
def strings(draw):
    kind = draw(st.sampled_from(["plain", "length", "pattern", "format"]))
    if kind == "pattern":
        pattern = draw(st.sampled_from(sorted(PATTERNS)))
        return {"type": "string", "pattern": pattern}, PATTERNS[pattern]
    if kind == "format":
        name = draw(st.sampled_from(sorted(FORMATS)))
        return {"type": "string", "format": name}, FORMATS[name]
    value, schema = draw(texts), {"type": "string"}
    if kind == "length":
        schema["minLength"] = draw(st.integers(0, len(value)))
        schema["maxLength"] = len(value) + draw(st.integers(0, 4))
    return schema, value


@st.composite
def constants(draw):
    values = draw(st.lists(st.none() | st.booleans() | st.integers(-9, 9) | texts, min_size=1, max_size=4))
    if draw(st.booleans()):
        return {"const": values[0]}, values[0]
    return {"enum": values}, draw(st.sampled_from(values))


leaves = st.one_of(
    integers(),
    multiples(),
    floats(),
    strings(),
    constants(),
    st.booleans().map(lambda value: ({"type": "boolean"}, value)),
    st.just(({"type": "null"}, None)),
    st.integers(0, 9).map(lambda value: ({"type": ["integer", "null"]}, value)),
    st.integers(3, 9).map(lambda value: ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, value)),
)


@st.composite
def arrays(draw, inner):
    schema, value = draw(inner)
    count = draw(st.integers(0, 3))
    if draw(st.booleans()):
        first, lead = draw(inner)
        return {"type": "array", "prefixItems": [first], "items": schema, "minItems": 1}, [lead, *[value] * count]
    whole = {"type": "array", "items": schema}
    if draw(st.booleans()):
        whole |= {"minItems": draw(st.integers(0, count)), "maxItems": count + draw(st.integers(0, 2))}
    return whole, [value] * count


@st.composite
def objects(draw, inner):
    keys = draw(st.lists(st.sampled_from(KEYS), unique=True, max_size=3))
    made = {key: draw(inner) for key in keys}
    required = [key for key in keys if draw(st.booleans())]
    schema = {"type": "object", "properties": {key: s for key, (s, _) in made.items()}, "required": required}
    value = {key: v for key, (_, v) in made.items() if key in required or draw(st.booleans())}
    extra = draw(st.sampled_from(["none", "any", "typed", "pattern"]))
    if extra == "none":
        schema["additionalProperties"] = False
    elif extra in ("typed", "pattern"):
        other, instance = draw(inner)
        if extra == "typed":
            schema["additionalProperties"] = other
        else:
            schema |= {"patternProperties": {"^p_": other}, "additionalProperties": False}
        value["p_1"] = instance
    return schema, value


@st.composite
def unions(draw, inner):
    options = draw(st.lists(inner, min_size=1, max_size=3))
    return {"anyOf": [schema for schema, _ in options]}, options[-1][1]


@st.composite
def references(draw, inner):
    schema, value = draw(inner)
    node = {
        "type": "object",
        "properties": {"value": schema, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    chain = None
    for _ in range(draw(st.integers(1, 2))):
        chain = {"value": value, "next": chain}
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}, chain


nested = st.recursive(leaves, lambda inner: st.one_of(arrays(inner), objects(inner), unions(inner)), max_leaves=5)
cases = nested | references(leaves)


@given(case=cases, seed=st.integers(0, 2**32), pretty=st.booleans())
@settings(max_examples=300)
def test_drawn_is_valid_and_valid_can_be_drawn(compiler, byte_tokenizer, case, seed, pretty):
    schema, value = case
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(value)
    spec = StructuredOutput(json_schema=schema)
    drawn = write(compiler.compile(spec), byte_tokenizer, seed)
    if drawn is not None:
        validator.validate(json.loads(drawn))
    state = compiler.compile(spec)
    ids = byte_tokenizer.encode(json.dumps(value, ensure_ascii=False, indent=2 if pretty else None))
    assert state.accept(ids) == len(ids)
    assert state.may_end


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "minProperties": 2},
        {"type": "object", "maxProperties": 1},
        {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1, "additionalProperties": False},
        {"oneOf": [{"type": "integer"}, {"type": "string"}]},
        {"oneOf": [{"properties": {"k": {"const": c}}, "required": ["k"], "type": "object"} for c in ("x", "y")]},
        {"type": "number", "multipleOf": 0.5},
        {"type": "array", "prefixItems": [{"type": "integer"}], "items": False},
        {"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}}, {"required": ["a"]}]},
        {"minLength": 2, "minimum": 3, "maxItems": 1},
        {},
    ],
    ids=json.dumps,
)
def test_rarer_keywords_are_enforced(compiler, byte_tokenizer, schema):
    for seed in range(8):
        drawn = write(compiler.compile(StructuredOutput(json_schema=schema)), byte_tokenizer, seed)
        if drawn is not None:
            jsonschema.Draft202012Validator(schema).validate(json.loads(drawn))


def test_smollm2_draws_valid_documents(smollm2_tokenizer):
    from trillion_infer.constrain import GrammarCompiler

    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "tags": {"type": "array", "items": {"enum": ["x"]}},
        },
        "required": ["name", "tags"],
        "additionalProperties": False,
    }
    state = GrammarCompiler(smollm2_tokenizer).compile(StructuredOutput(json_schema=schema))
    for seed in range(3):
        drawn = write(state.fork(), smollm2_tokenizer, seed)
        jsonschema.validate(json.loads(drawn), schema)

"""Structured output through the generator: the grammar holds the model, and a failing one ends its request only."""

import json

import pytest

from trillion_infer import InvalidRequestError, SamplingParams
from trillion_infer.core.sampling_params import StructuredOutput
from trillion_infer.testing.byte_tokenizer import EOS, byte_tokenizer
from trillion_infer.testing.scripted import scripted_generator

TOKENIZER = byte_tokenizer()


def run(generator, **requests):
    for name, params in requests.items():
        generator.add(name, "ABC", params)
    while generator.has_work:
        generator.step()
    generator.engine.check_integrity()
    return {name: generator.take(name).outputs for name in requests}


def params(max_tokens=64, n=1, **spec):
    return SamplingParams(
        temperature=0, max_tokens=max_tokens, n=n, structured_output=StructuredOutput(**spec) if spec else None
    )


@pytest.mark.parametrize("n", [1, 3])
def test_every_completion_follows_the_schema(n):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    generator = scripted_generator([*b'xx{"a": 12}', EOS], TOKENIZER)
    outputs = run(generator, r=params(n=n, json_schema=schema))["r"]
    assert all(isinstance(json.loads(output.text)["a"], int) for output in outputs)
    assert [output.finish_reason for output in outputs] == ["stop"] * n


def test_a_choice_ends_by_itself():
    outputs = run(scripted_generator([98], TOKENIZER), r=params(choice=("aaa", "bbb")))["r"]
    assert (outputs[0].text, outputs[0].finish_reason) == ("bbb", "stop")


def test_white_space_is_bounded_and_nothing_follows_the_object_u44():
    script = [*b"{", *[10] * 30, *b"}", 10]
    outputs = run(scripted_generator(script, TOKENIZER), r=params(200, json_object=True))["r"]
    assert json.loads(outputs[0].text) == {}
    assert outputs[0].finish_reason == "stop"


def test_a_grammar_that_refuses_a_token_ends_its_own_request_only_t01():
    generator = scripted_generator([97], TOKENIZER)
    generator.add("bad", "ABC", params(8, regex="a+"))
    generator.add("good", "ABC", params(8))
    request = generator._prompts["bad"].texts[0].request
    request.grammar.accept = lambda ids: 0
    while generator.has_work:
        generator.step()
    assert generator.take("bad").outputs[0].finish_reason == "error"
    assert generator.take("good").outputs[0].text == "a" * 8
    generator.engine.check_integrity()


def test_a_schema_that_cannot_be_enforced_is_refused_with_its_pointer_u42():
    schema = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    with pytest.raises(InvalidRequestError, match="#/properties/a"):
        run(scripted_generator([97], TOKENIZER), r=params(json_schema=schema))

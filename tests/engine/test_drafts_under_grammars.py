"""Drafts and grammars together: masks by request and position, whatever is trimmed, whoever else runs."""

import re

import pytest

from tests.engine.test_speculation import SMALL, Ascii, accepted, assert_equal
from trillion_infer import SamplingParams
from trillion_infer.constrain import compile_grammar
from trillion_infer.core.sampling_params import StructuredOutput

PATTERNS = [None, "(ab){4,40}", "(left|right) and then (up|down)", None, "[0-9]{30}", '\\{"a": \\[(1, ){2,9}2\\]\\}']


def run_together(llm, seed):
    """One request a pattern, all at once; every second one draws."""
    grammars = [p and compile_grammar(StructuredOutput(regex=p), Ascii()) for p in PATTERNS]
    names = [f"r{i}" for i in range(len(PATTERNS))]
    for i, (name, grammar) in enumerate(zip(names, grammars, strict=True)):
        params = SamplingParams(temperature=0.9 * (i % 2), seed=seed + i, max_tokens=40, min_tokens=i)
        state, requests = llm.generator.prepare(name, [97, 98] * (3 + i), params)
        requests[0].grammar, requests[0].needs_known_tokens = grammar, grammar is not None
        llm.generator.submit((state, requests))
    while not all(llm.generator.output(name).finished for name in names):
        llm.generator.step()
    return [llm.generator.take(name) for name in names]


@pytest.mark.parametrize("drafters", ["ngram", "ngram,suffix,grammar"])
def test_each_request_keeps_its_own_grammar_beside_drafts_of_others_t03_t05_t06(make_llm, drafters):
    plain, llm = make_llm("smollm2", **SMALL), make_llm("smollm2", **SMALL, speculate=drafters)
    llm.engine.speculation.cost.estimate = lambda tokens: 1.0
    for seed in range(4):
        expected = run_together(plain, seed)
        assert_equal(run_together(llm, seed), expected)
        for output, pattern in zip(expected, PATTERNS, strict=True):
            answer = output.outputs[0]
            text = bytes(token for token in answer.token_ids if token != 1).decode("ascii")
            assert pattern is None or answer.finish_reason == "length" or re.fullmatch(pattern, text)
    assert accepted(llm) > 0

"""Every drafter, on every kind of mesh: greedy answers are token for token those of an engine without drafts."""

from dataclasses import replace

import pytest

from tests.conftest import GOLDEN
from tests.engine.helpers import check_idle
from tests.engine.test_speculation import Ascii, accepted, in_batches, mixed
from trillion_infer import LLM, SamplingParams
from trillion_infer.constrain.compiler import GrammarCompiler
from trillion_infer.core.sampling_params import StructuredOutput

pytestmark = pytest.mark.slow

COUNT = 200
SMALL = {"page_size": 8, "prefill_chunk": 32, "max_running": 4}
TINY = GOLDEN / "tiny"
DRAFTERS = {
    "ngram": ("smollm2", "ngram"),
    "suffix": ("deepseek_v3", "suffix"),
    "grammar": ("smollm2", "grammar"),
    "draft": ("smollm2", f"draft:{TINY / 'smollm2'}"),
    "eagle3_llama": ("llama_deep", f"eagle3:{TINY / 'eagle3_llama'}"),
    "eagle3_mla": ("deepseek_v3", f"eagle3:{TINY / 'eagle3_mla'}"),
    "mtp": ("deepseek_v3_mtp", "mtp"),
}
PLACES = {
    "one": {},
    "2x2": {"mesh": "data=2,tensor=2"},
    "disaggregated": {"disaggregate": "prefill=1,decode=2"},
}
REGEXES = ("(left|right) and then (up|down)", "[0-9]{3} of (one|two) hundred", '\\{"a": (true|false), "b": \\[\\]\\}')


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of every length and kind; greedy, with stops, penalties, biases and log-probabilities."""
    prompts, params = mixed(COUNT, seed=7)
    return prompts, [replace(each, temperature=0.0, seed=None, prompt_logprobs=None) for each in params]


def answers(llm: LLM, grammar: bool) -> list[tuple[list[int], str | None]]:
    prompts, params = requests()
    if not grammar:
        return [(o.outputs[0].token_ids, o.outputs[0].finish_reason) for o in in_batches(llm, prompts, params)]
    found = []
    compiler = GrammarCompiler(Ascii())
    for number, prompt in enumerate(prompts):
        each = SamplingParams(temperature=0.0, max_tokens=5 + number % 40)
        state, (request,) = llm.generator.prepare(str(number), prompt, each)
        request.grammar = compiler.compile(StructuredOutput(regex=REGEXES[number % len(REGEXES)]))
        request.needs_known_tokens = True
        llm.generator.submit((state, [request]))
        while not llm.generator.output(str(number)).finished:
            llm.generator.step()
        output = llm.generator.take(str(number)).outputs[0]
        found.append((output.token_ids, output.finish_reason))
    return found


CASES = [(name, place) for name in DRAFTERS for place in PLACES]


@pytest.mark.parametrize(("name", "place"), CASES)
def test_200_greedy_requests_equal_plain(make_llm, name, place):
    target, speculate = DRAFTERS[name]
    expected = answers(make_llm(target, **SMALL), name == "grammar")
    llm = make_llm.fresh(target, **SMALL, **PLACES[place], speculate=speculate)
    for engine in getattr(llm.engine, "decode", [llm.engine]):
        engine.speculation.draft_always()
    assert answers(llm, name == "grammar") == expected
    assert accepted(llm) > 0 or name in ("eagle3_llama", "eagle3_mla", "mtp"), "random heads may guess nothing"
    assert sum(value for key, value in llm.stats().items() if key.endswith(".proposed")) > COUNT
    check_idle(llm)
    llm.close()

"""A prompt's tokens and the slots of KV pages split over devices: the tokens of one device, float32."""

import numpy as np
import pytest

from tests.engine.helpers import check_idle, greedy, tokens_of
from tests.engine.test_equalities import MIXED, SMALL
from trillion_infer import SamplingParams
from trillion_infer.layers import exchange, latent_slots

pytestmark = pytest.mark.matrix

OPTIONS = {**SMALL, "precompile": False}


def check_same_tokens(make_llm, name: str, mesh: str, **options) -> None:
    one, many = (make_llm(name, **OPTIONS, **options, mesh=each) for each in ("", mesh))
    assert tokens_of(many.generate(MIXED, greedy(12))) == tokens_of(one.generate(MIXED, greedy(12)))
    check_idle(many)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [("deepseek_v3", "sequence=2,tensor=2"), ("llama4_scout", "sequence=4")],
)
def test_a_split_sequence_equals_one_device(make_llm, name, mesh):
    check_same_tokens(make_llm, name, mesh)


@pytest.mark.parametrize("mesh", ["tensor=2", "sequence=2,tensor=2"])
def test_gathered_queries_in_slices_equal_one_device(make_llm, monkeypatch, mesh):
    """As large steps do it, here 16 tokens at a time."""
    monkeypatch.setattr(latent_slots, "SLICE_BYTES", 1)
    options = {**OPTIONS, "prefill_chunk": 64}
    one, many = make_llm("deepseek_v3", **options), make_llm.fresh("deepseek_v3", **options, mesh=mesh)
    assert tokens_of(many.generate(MIXED[-2:], greedy(4))) == tokens_of(one.generate(MIXED[-2:], greedy(4)))
    many.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "deepseek_v3", "llama4_scout", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("mesh", ["sequence=4", "sequence=8", "sequence=4,tensor=2", "data=2,sequence=2,tensor=2"])
def test_every_model_on_every_split_of_the_sequence(make_llm, name, mesh):
    check_same_tokens(make_llm, name, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3", "llama4_scout", "gpt_oss"])
@pytest.mark.parametrize("mesh", ["expert=8", "data=2,expert=4", "expert=4,tensor=2", "expert=2,sequence=2,tensor=2"])
def test_experts_over_every_axis_equal_one_device(make_llm, name, mesh):
    check_same_tokens(make_llm, name, mesh)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), [("llama4_scout", "data=2,sequence=2,tensor=2"), ("deepseek_v3", "data=4")])
def test_tokens_sent_to_their_experts_equal_one_device(make_llm, monkeypatch, name, mesh):
    """As large steps do it, here for every step."""
    monkeypatch.setattr(exchange, "LEAST_TOKENS", 1)
    one = make_llm(name, **OPTIONS)
    many = make_llm.fresh(name, **OPTIONS, mesh=mesh)
    assert tokens_of(many.generate(MIXED, greedy(12))) == tokens_of(one.generate(MIXED, greedy(12)))
    many.close()


@pytest.mark.slow
def test_drafts_on_split_pages_equal_one_device(make_llm):
    """Rows that verify drafts write and read slots of every device."""
    prompts = [([7, 8, 9, 10, 11, 12] * 6)[:n] for n in (20, 33)]
    one, many = (make_llm("deepseek_v3", **OPTIONS, mesh=mesh) for mesh in ("", "sequence=2,tensor=2"))
    drafting = make_llm("deepseek_v3", **OPTIONS, mesh="sequence=2,tensor=2", speculate="ngram")
    expected = tokens_of(one.generate(prompts, greedy(16)))
    assert tokens_of(many.generate(prompts, greedy(16))) == expected
    assert tokens_of(drafting.generate(prompts, greedy(16))) == expected


def test_prompt_scores_do_not_depend_on_the_split(make_llm):
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=1)
    prompt = MIXED[-1]
    scores = []
    for mesh in ("", "sequence=4"):
        (output,) = make_llm("smollm2", **OPTIONS, mesh=mesh).generate([prompt], params)
        given = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
        scores.append([entry[token].logprob for token, entry in given])
    np.testing.assert_allclose(scores[1], scores[0], atol=1e-4)

"""KV of eight bits: near plain KV, and the same whatever path a key took into its page."""

import numpy as np
import pytest

from tests.engine.helpers import check_idle, greedy, tokens_of
from tests.engine.test_equalities import MIXED, prompts_of, tight_memory
from trillion_infer import ConfigError
from trillion_infer.core.outputs import RequestOutput

pytestmark = pytest.mark.matrix

MODELS = ["smollm2", "gemma3_text", "deepseek_v3"]
FORMATS = ["int8", "fp8"]
SMALL = {"page_size": 8, "prefill_chunk": 16, "precompile": False}
SCORED = greedy(12, logprobs=0, prompt_logprobs=0)


def bits(outputs: list[RequestOutput]) -> list[tuple[list[int], list[float]]]:
    """Tokens and the log-probability of each."""
    answers = [output.outputs[0] for output in outputs]
    return [
        (a.token_ids, [entry[t].logprob for entry, t in zip(a.logprobs or [], a.token_ids, strict=True)])
        for a in answers
    ]


def prompt_scores(output: RequestOutput) -> np.ndarray:
    entries = (output.prompt_logprobs or [])[1:]
    return np.asarray([e[t].logprob for e, t in zip(entries, output.prompt_token_ids[1:], strict=True)])


@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_it_is_near_plain_kv_and_a_third_of_its_size(make_llm, name, kv_dtype):
    plain, small = make_llm(name, **SMALL), make_llm(name, **SMALL, kv_dtype=kv_dtype)
    prompts = prompts_of(8, [40, 60])
    for a, b in zip(plain.generate(prompts, SCORED), small.generate(prompts, SCORED), strict=True):
        gap = np.abs(prompt_scores(a) - prompt_scores(b))
        assert 0 < gap.mean() < {"int8": 0.06, "fp8": 0.3}[kv_dtype]
    for ours, theirs in zip(small.blueprint.layouts, plain.blueprint.layouts, strict=True):
        assert ours.page_bytes == theirs.page_bytes // 4 + 4 * ours.layers * ours.page_size * ours.scale_rows
    check_idle(small)


def check_same(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """Equal tokens. Programs of other shapes may round activations otherwise, and an eight-bit number that lay between
    two steps then falls on the other: scores to 2e-3."""
    for (tokens, scores), (wanted, near) in zip(bits(found), bits(expected), strict=True):
        assert tokens == wanted
        np.testing.assert_allclose(scores, near, atol=2e-3)


@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_chunked_whole_alone_and_cached_are_the_same(make_llm, name, kv_dtype):
    chunked = make_llm(name, **SMALL, kv_dtype=kv_dtype)
    expected = chunked.generate(MIXED, greedy(logprobs=0))
    check_same(chunked.generate(MIXED, greedy(logprobs=0)), expected)  # found in the prefix cache
    whole = make_llm(name, **{**SMALL, "prefill_chunk": 64}, prefix_caching=False, kv_dtype=kv_dtype)
    check_same(whole.generate(MIXED, greedy(logprobs=0)), expected)
    check_same([whole.generate(prompt, greedy(logprobs=0))[0] for prompt in MIXED], expected)


@pytest.mark.parametrize("name", ["smollm2", "deepseek_v3"])
@pytest.mark.parametrize("mesh", ["tensor=2", "data=2"])
def test_a_mesh_equals_one_device(make_llm, name, mesh):
    one, many = (make_llm(name, **SMALL, kv_dtype="int8", **options) for options in ({}, {"mesh": mesh}))
    assert tokens_of(many.generate(MIXED, greedy())) == tokens_of(one.generate(MIXED, greedy()))


@pytest.mark.parametrize("name", MODELS)
def test_pages_come_back_from_the_host_with_their_scales(make_llm, name):
    cold = make_llm(name, **SMALL, prefix_caching=False, kv_dtype="int8")
    prompts = prompts_of(9, [60] * 6)
    expected = [cold.generate(prompt, greedy(logprobs=0))[0] for prompt in prompts]
    memory = tight_memory(cold, pages=24 // len(cold.blueprint.layouts))
    small = make_llm.fresh(name, **SMALL, max_model_len=96, kv_memory=memory, host_kv=1e8, kv_dtype="int8")
    small.engine.tiering.promoter.chooses = False  # so small a model computes faster than memory is read
    for _ in range(2):
        check_same([small.generate(prompt, greedy(logprobs=0))[0] for prompt in prompts], expected)
    stats = small.stats()
    assert stats["kv_host.hit_tokens"] > 0
    assert stats["kv_layered_prefills"] > 0
    assert stats["kv_host.digest_failures"] == 0
    check_idle(small)
    small.close()


@pytest.mark.parametrize("name", ["smollm2", "deepseek_v3"])
def test_pages_travel_between_meshes_with_their_scales(make_llm, name):
    one = make_llm(name, **SMALL, kv_dtype="fp8")
    apart = make_llm(name, **SMALL, max_running=1, kv_dtype="fp8", disaggregate="prefill=1,decode=2")
    assert tokens_of(apart.generate(MIXED[4:], greedy())) == tokens_of(one.generate(MIXED[4:], greedy()))
    assert apart.stats()["handoffs"] > 0
    check_idle(apart)


def test_a_format_that_there_is_not_is_refused(make_llm):
    with pytest.raises(ConfigError, match="kv_dtype is 'int4'; it must be one of"):
        make_llm.fresh("smollm2", kv_dtype="int4")

"""Two paths, one answer: each pair of ways to compute the same thing gives the same tokens, float32."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.helpers import check_idle, greedy, tokens_of
from trillion_infer import SamplingParams

pytestmark = pytest.mark.matrix

MODELS = ["smollm2", "gemma3_text", "deepseek_v3", "llama4_scout", "gpt_oss"]
SMALL = {"page_size": 8, "prefill_chunk": 16, "precompile": False}


def prompts_of(seed: int, lengths: list[int], vocab: int = 128) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(4, vocab, n).tolist() for n in lengths]


MIXED = prompts_of(0, [1, 2, 7, 8, 9, 30, 50, 63])


@pytest.fixture
def plain(make_llm):
    """Of a model: XLA's reference, prompts in one piece, no prefixes found. Whoever equals it in spite of other options
    equals it in each of them."""
    return lambda name: make_llm(name, **{**SMALL, "prefill_chunk": 64}, prefix_caching=False, attention="reference")


@pytest.mark.parametrize("name", MODELS)
def test_kernels_chunks_and_a_prefix_found_equal_the_plain_way_alone_and_together_u51_u06(make_llm, plain, name):
    prompts = [*MIXED, MIXED[-1], MIXED[-1] + MIXED[2], MIXED[-1][:40] + MIXED[3]]
    expected = tokens_of(plain(name).generate(prompts, greedy()))
    llm = make_llm(name, **SMALL)
    assert tokens_of(llm.generate(MIXED, greedy())) == expected[: len(MIXED)]
    found = [llm.generate(prompt, greedy())[0] for prompt in prompts]
    assert tokens_of(found) == expected
    hits = [output.num_cached_tokens for output in found]
    assert all(hit < len(prompt) for hit, prompt in zip(hits, prompts, strict=True)), hits
    assert min(hits[-3:-1]) > 0, hits
    assert hits[-1] > 0 or any(layout.key.window for layout in llm.blueprint.layouts), hits
    check_idle(llm)


@pytest.mark.parametrize("name", ["smollm2", "gemma3_text"])
def test_preempted_equals_not_u50(make_llm, name):
    """Penalties, log-probabilities, a seed: the same numbers with a pool that forces preemption."""
    params = [
        SamplingParams(temperature=0.8, seed=i, max_tokens=40, ignore_eos=True, logprobs=3, frequency_penalty=0.5)
        for i in range(8)
    ]
    roomy = make_llm(name, **SMALL)
    pages = {"smollm2": 26, "gemma3_text": 10}[name]
    tight = make_llm(name, **SMALL, max_model_len=112, kv_memory=tight_memory(roomy, pages))
    tight.engine.schedulers[0]._lengths._prior = 1
    expected, found = roomy.generate(MIXED, params), tight.generate(MIXED, params)
    assert tight.stats()["preemptions"] > 0
    assert tokens_of(found) == tokens_of(expected)
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours.outputs[0].logprobs, theirs.outputs[0].logprobs, strict=True):
            assert list(a) == list(b)
            np.testing.assert_allclose([x.logprob for x in a.values()], [x.logprob for x in b.values()], atol=1e-4)
    check_idle(tight)


def tight_memory(llm, pages: int) -> int:
    """Bytes of `pages` pages of every pool of a model."""
    return pages * sum(layout.page_bytes for layout in llm.blueprint.layouts)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mesh", ["tensor=2", "tensor=4", "tensor=8", "data=2", "data=2,tensor=2"])
def test_a_mesh_equals_one_device_u58(make_llm, name, mesh):
    if name not in ("smollm2", "deepseek_v3") and mesh != "tensor=2":
        pytest.skip("one dense and one latent mixture run on every mesh")
    one, many = make_llm(name, **SMALL), make_llm(name, **SMALL, mesh=mesh)
    assert tokens_of(many.generate(MIXED, greedy())) == tokens_of(one.generate(MIXED, greedy()))
    check_idle(many)


@pytest.mark.parametrize("name", ["deepseek_v3", "llama4_scout"])
@pytest.mark.parametrize("mesh", ["expert=4", "data=2,expert=2,tensor=2"])
def test_expert_parallel_equals_one_device(make_llm, name, mesh):
    one, many = make_llm(name, **SMALL), make_llm(name, **SMALL, mesh=mesh)
    assert tokens_of(many.generate(MIXED, greedy())) == tokens_of(one.generate(MIXED, greedy()))


def test_not_running_ahead_equals_running_ahead(make_llm):
    ahead, behind = make_llm("smollm2", **SMALL), make_llm("smollm2", **SMALL)
    expected = tokens_of(ahead.generate(MIXED, greedy()))
    behind.engine._depth = 0
    try:
        assert tokens_of(behind.generate(MIXED, greedy())) == expected
    finally:
        behind.engine._depth = 1


@settings(max_examples=12)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(0, 99), st.booleans())
def test_seeded_requests_do_not_depend_on_their_company_u05(make_llm, lengths, seed, crowd):
    """The same tokens alone, beside unseeded neighbours, at any slot."""
    llm = make_llm("smollm2", **SMALL)
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=8, ignore_eos=True)
    others = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    prompts = prompts_of(seed, lengths)
    alone = tokens_of(llm.generate(prompts[-1], params))[0]
    batch = [*prompts[:-1], prompts[-1]] if crowd else [prompts[-1], *prompts[:-1]]
    place = len(batch) - 1 if crowd else 0
    outputs = llm.generate(batch, [params if i == place else others for i in range(len(batch))])
    assert tokens_of(outputs)[place] == alone

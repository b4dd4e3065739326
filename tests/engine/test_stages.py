"""Pipeline stages give the tokens of one device, copy no pool and compile nothing on the way."""

import math
import re

import pytest

from tests.engine.helpers import check_idle, greedy, tokens_of
from tests.engine.test_equalities import prompts_of
from trillion_infer import LLM, ConfigError, SamplingParams

pytestmark = pytest.mark.matrix

SMALL = {"page_size": 8, "prefill_chunk": 32, "max_running": 32, "precompile": False}
MIXED = prompts_of(0, [1, 2, 7, 8, 9, 30, 50, 63] * 3)
"""More requests than a micro-batch has room for, so that decode steps have several."""


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("smollm2", "stage=2,tensor=2"),
        pytest.param("smollm2", "stage=3", marks=pytest.mark.slow),
        ("deepseek_v3", "stage=2,expert=2,tensor=2"),
        pytest.param("deepseek_v3", "stage=2,data=2,tensor=2", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "stage=4", marks=pytest.mark.slow),
        pytest.param("llama4_scout", "stage=2,expert=2,tensor=2", marks=pytest.mark.slow),
        ("llama4_scout", "stage=4"),
    ],
)
def test_stages_equal_one_device(make_llm, name, mesh):
    one, many = make_llm(name, **SMALL), make_llm(name, **SMALL, mesh=mesh)
    assert tokens_of(many.generate(MIXED, greedy(6))) == tokens_of(one.generate(MIXED, greedy(6)))
    check_idle(many)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param("deepseek_v3", "stage=2,expert=2,tensor=2", marks=pytest.mark.slow),
        ("llama4_scout", "stage=4"),
    ],
)
def test_stages_take_up_a_cached_prefix(make_llm, name, mesh):
    llm = make_llm(name, **SMALL, mesh=mesh)
    cold = make_llm(name, **SMALL).generate(MIXED[7] + MIXED[2], greedy(6))
    llm.generate(MIXED[7], greedy(6))
    again = llm.generate(MIXED[7] + MIXED[2], greedy(6))
    assert again[0].num_cached_tokens > 0
    assert tokens_of(again) == tokens_of(cold)


def test_stages_verify_drafts(make_llm):
    """Verification rows may be cut between micro-batches."""
    prompts = [([5, 9, 11, 13] * 8)[: 20 + n] for n in range(8)]
    options = {**SMALL, "max_running": 8, "prefill_chunk": 64}
    plain = make_llm("smollm2", **options)
    drafted = make_llm("smollm2", **options, mesh="stage=2", speculate="ngram")
    assert tokens_of(drafted.generate(prompts, greedy(24))) == tokens_of(plain.generate(prompts, greedy(24)))
    assert drafted.stats()["speculate.ngram.drafts"] > 0


def test_stages_give_the_same_scores(make_llm):
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    one, many = (make_llm("smollm2", **SMALL, **extra) for extra in ({}, {"mesh": "stage=2"}))
    (ours,), (theirs,) = many.generate([MIXED[5]], params), one.generate([MIXED[5]], params)
    for a, b in zip(
        [*ours.prompt_logprobs[1:], *ours.outputs[0].logprobs],
        [*theirs.prompt_logprobs[1:], *theirs.outputs[0].logprobs],
        strict=True,
    ):
        assert {t: pytest.approx(v.logprob, abs=1e-4) for t, v in a.items()} == {t: v.logprob for t, v in b.items()}


@pytest.mark.parametrize("which", ["decode", "mixed"])
@pytest.mark.parametrize("name", ["gemma3_text", "deepseek_v3"])
def test_no_stage_copies_a_pool(make_llm, name, which):
    """Looks at the compiled program: no copy of a pool's shape, and temporaries under 2% of a pool."""
    blueprint = make_llm(name, **SMALL, mesh="stage=2").blueprint
    programs = blueprint.programs(tuple(40_000 for _ in blueprint.layouts))
    bucket = (programs.buckets.decode if which == "decode" else programs.buckets.mixed)[-1]
    program = programs.forward(bucket)
    shards = [pool.sharding.shard_shape(pool.shape) for pool in programs.state.pools]
    shapes = "|".join({",".join(map(str, shape)) for shape in shards})
    copies = [x for x in program.run.as_text().splitlines() if re.search(rf"= \S*\[({shapes})\]\S* copy\(", x)]
    assert not copies
    assert program.temp_bytes < 0.02 * min(math.prod(shape) * 4 for shape in shards)


def test_a_stage_holds_only_its_layers(make_llm):
    """Weights, pools and vocabulary are split: none is replicated over the stages."""
    blueprint = make_llm("smollm2", **SMALL, mesh="stage=3").blueprint
    for name, leaf in blueprint.abstract_params.items():
        if name != "norm.weight":
            assert math.prod(leaf.sharding.shard_shape(leaf.shape)) * 3 == leaf.size, name
    pool = blueprint.layouts[0].abstract(3, blueprint.mesh)
    assert pool.sharding.shard_shape(pool.shape)[0] == 1


def test_more_stages_than_layers_are_refused():
    from tests.conftest import GOLDEN

    with pytest.raises(ConfigError, match=r"stage is 8 and the model has 3 layers; .* set stage to 3 or less"):
        LLM(GOLDEN / "tiny" / "smollm2", mesh="stage=8")

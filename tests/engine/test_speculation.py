"""With drafts and without: the same answers, and figures that say what drafts gave."""

import random
from dataclasses import replace

import jax
import numpy as np
import pytest

from tests.conftest import GOLDEN
from tests.engine.helpers import check_idle, greedy, tokens_of
from tests.engine.test_equalities import tight_memory
from trillion_infer import LLM, ConfigError, SamplingParams
from trillion_infer.constrain import compile_grammar
from trillion_infer.core.outputs import RequestOutput
from trillion_infer.core.sampling_params import StructuredOutput
from trillion_infer.engine.buckets import MANY_WIDTH, Bucket, make_buckets
from trillion_infer.engine.draft_length import MAX_DRAFTS
from trillion_infer.engine.programs import sampler_name
from trillion_infer.engine.speculation import BucketCost
from trillion_infer.speculate.adaptive import allot, can_pay

pytestmark = pytest.mark.matrix


class Ascii:
    """A vocabulary of the tiny models' size: token i is byte i, and 1 ends."""

    vocab_size, bos_id, eos_ids, special_ids = 128, None, frozenset({1}), frozenset({1})

    def __init__(self) -> None:
        self.added_tokens = {"<end>": 1}

    def id_to_bytes(self, id: int) -> bytes:
        return bytes([id])

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode("ascii"))


SMALL = {"page_size": 8, "prefill_chunk": 32, "max_running": 4}
MODELS = ["smollm2", "deepseek_v3"]
EACH = [(name, drafters, None) for name in MODELS for drafters in ("ngram", "suffix")]
EACH.append(("gemma3_text", "ngram", None))  # layers that keep a window only: rejected drafts move it back
MESHES = [*((name, "ngram,suffix", "tensor=2") for name in MODELS), ("smollm2", "suffix", "data=2")]


@pytest.fixture(scope="module")
def drafting(make_llm):
    """drafting(model, drafters, **options): an LLM to which drafts cost nothing, so that it tries all it has."""

    def make(name: str, drafters: str, **options) -> LLM:
        llm = make_llm(name, **{**SMALL, **options}, speculate=drafters)
        llm.engine.speculation.cost.estimate = lambda tokens: 1.0
        return llm

    return make


def repetitive(rng: random.Random, longest: int = 60) -> list[int]:
    """A prompt that says the same several times, with a fault here and there."""
    piece = [rng.randrange(4, 128) for _ in range(rng.randrange(1, 9))]
    prompt = (piece * 30)[: rng.randrange(2, longest)]
    prompt[rng.randrange(len(prompt))] = rng.randrange(4, 128)
    return prompt


def mixed(count: int, seed: int = 0) -> tuple[list[list[int]], list[SamplingParams]]:
    """Requests of every kind; what is drawn has a seed."""
    rng = random.Random(seed)
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.0, 0.3, 0.8]),
            top_k=rng.choice([0, 3]),
            top_p=rng.choice([1.0, 0.9]),
            seed=rng.randrange(99),
            max_tokens=rng.randrange(9, 40) if i % 3 else rng.randrange(1, 9),
            min_tokens=rng.choice([0, 1, 9]) if i % 3 else 0,
            stop_token_ids=rng.choice([None, [rng.randrange(4, 128) for _ in range(8)]]),
            logprobs=rng.choice([None, 0, 3]),
            prompt_logprobs=rng.choice([None, None, 2]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.1]),
            frequency_penalty=rng.choice([0.0, 0.0, 0.2]),
            logit_bias=rng.choice([None, None, {5: -100.0, 7: 2.0}]),
            ignore_eos=rng.choice([True, False]),
        )
        for i in range(count)
    ]
    return [repetitive(rng) for _ in range(count)], params


def in_batches(llm: LLM, prompts: list, params: list[SamplingParams]) -> list[RequestOutput]:
    """As many as run at once: drafts are not tried while prompts wait."""
    size = SMALL["max_running"]
    parts = [slice(i, i + size) for i in range(0, len(prompts), size)]
    return [output for part in parts for output in llm.generate(prompts[part], params[part])]


def assert_equal(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        a, b = ours.outputs[0], theirs.outputs[0]
        assert a.token_ids == b.token_ids
        assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason)
        assert ours.prompt_logprobs is None or len(ours.prompt_logprobs) == len(theirs.prompt_logprobs)
        assert (a.logprobs is None) == (b.logprobs is None)
        for x, y in zip(a.logprobs or [], b.logprobs or [], strict=True):
            assert list(x) == list(y)
            np.testing.assert_allclose([v.logprob for v in x.values()], [v.logprob for v in y.values()], atol=1e-4)


def accepted(llm: LLM) -> float:
    return sum(value for name, value in llm.stats().items() if name.startswith("speculate.") and "accepted" in name)


@pytest.mark.parametrize(("name", "drafters", "mesh"), EACH + MESHES)
def test_speculative_equals_plain_and_compiles_nothing(make_llm, drafting, name, drafters, mesh):
    """104 requests of every kind, greedy and drawn."""
    on_mesh = {"mesh": mesh} if mesh else {}
    plain, llm = make_llm(name, **SMALL, **on_mesh), drafting(name, drafters, **on_mesh)
    requests = mixed(104)
    compiled: list[str] = []

    def listen(event: str, duration: float, **kwargs: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    expected, before = in_batches(plain, *requests), accepted(llm)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        found = in_batches(llm, *requests)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert_equal(found, expected)
    assert accepted(llm) > before
    assert compiled == []
    assert llm.stats()["compilations"] == len(llm.engine.programs.names())
    check_idle(llm)


def test_disaggregated_with_drafts_equals_plain(make_llm):
    """Drafts are made and verified where tokens are decoded."""
    plain = make_llm("smollm2", **SMALL)
    llm = make_llm("smollm2", **SMALL, speculate="ngram,suffix", disaggregate="prefill=1,decode=1")
    llm.engine.decode[0].speculation.draft_always()
    requests = mixed(60)
    requests = requests[0], [replace(each, prompt_logprobs=None) for each in requests[1]]
    assert_equal(in_batches(llm, *requests), in_batches(plain, *requests))
    assert accepted(llm) > 0
    assert llm.stats()["speculate.ngram.acceptance_length"] >= 1
    check_idle(llm)


def test_drafts_save_steps(make_llm, drafting):
    plain, llm = make_llm("smollm2", **SMALL), drafting("smollm2", "ngram")
    prompts = [repetitive(random.Random(i)) for i in range(8)]
    steps = {}
    for each in (plain, llm):
        before = each.stats()["steps"]
        tokens = tokens_of(each.generate(prompts, greedy(150)))
        steps[each] = each.stats()["steps"] - before, tokens
    assert steps[llm][1] == steps[plain][1]
    assert steps[llm][0] < steps[plain][0]


def test_requests_that_wait_for_a_slot_do_not_stop_drafts(drafting):
    """Two slots and eight requests: each gets the drafts that it gets alone."""
    llm = drafting("smollm2", "ngram", max_running=2, prefill_chunk=64)
    prompts = [[20 + i, 21, 22, 23] * 5 for i in range(8)]

    def drafts(batches: list) -> float:
        before = llm.stats().get("speculate.ngram.drafts", 0)
        for batch in batches:
            llm.generate(batch, greedy(40))
        return llm.stats()["speculate.ngram.drafts"] - before

    alone = drafts([[prompt] for prompt in prompts])
    assert alone > 10
    assert drafts([prompts]) == pytest.approx(alone, rel=0.2)


def test_outputs_tell_what_drafts_gave(drafting):
    """Each output by drafter; together what stats() counts, with the lengths and rates that follow."""
    llm = drafting("smollm2", "ngram")
    before = llm.stats()
    outputs = llm.generate([repetitive(random.Random(i)) for i in range(4)], greedy(60))
    each, after = [output.metrics.drafts["ngram"] for output in outputs], llm.stats()
    for name, field in (("drafts", "drafts"), ("proposed", "drafted"), ("accepted", "accepted")):
        key = f"speculate.ngram.{name}"
        assert sum(getattr(figures, field) for figures in each) == after[key] - before.get(key, 0)
    assert (
        after["speculate.ngram.acceptance_rate"]
        == after["speculate.ngram.accepted"] / after["speculate.ngram.proposed"]
    )
    assert all(1 <= f.acceptance_length <= 1 + f.drafted / f.drafts for f in each)


def test_preempted_equals_not(make_llm, drafting):
    plain, roomy = make_llm("smollm2", **SMALL), drafting("smollm2", "ngram")
    tight = drafting("smollm2", "ngram", max_model_len=112, kv_memory=tight_memory(roomy, pages=26))
    tight.engine.schedulers[0]._lengths._prior = 1
    prompts = [repetitive(random.Random(i)) for i in range(8)]
    params = [SamplingParams(temperature=0.3, seed=i, max_tokens=40, ignore_eos=True, logprobs=2) for i in range(8)]
    params[0] = greedy(40, frequency_penalty=0.1)
    expected, before = plain.generate(prompts, params), accepted(tight)
    assert_equal(tight.generate(prompts, params), expected)
    assert tight.stats()["preemptions"] > 0
    assert accepted(tight) > before
    check_idle(tight)


def test_cached_prefix_equals_cold(make_llm, drafting):
    """Blocks that hold accepted drafts are shared; those that held rejected ones are right, too."""
    plain = make_llm("smollm2", **SMALL, prefix_caching=False)
    llm = drafting("smollm2", "suffix")
    prompt = repetitive(random.Random(5)) + [9] * 20
    first = llm.generate(prompt, greedy(60))[0]
    longer = prompt + first.outputs[0].token_ids
    found = llm.generate(longer, greedy(60))[0]
    assert found.num_cached_tokens > len(prompt)
    assert tokens_of([found]) == tokens_of(plain.generate(longer, greedy(60)))


def test_tokens_after_the_one_that_ends_are_dropped(drafting, make_llm):
    """Every place at which a run of accepted drafts may be cut: by a stop token, and by max_tokens."""
    plain, llm = make_llm("smollm2", **SMALL), drafting("smollm2", "ngram")
    prompt = repetitive(random.Random(3))
    whole = tokens_of(plain.generate(prompt, greedy(24)))[0]
    for length in range(1, 24):
        assert tokens_of(llm.generate(prompt, greedy(length)))[0] == whole[:length]
        stopped = greedy(24, stop_token_ids=[whole[length]], min_tokens=length // 2)
        assert_equal(llm.generate(prompt, stopped), plain.generate(prompt, stopped))


def test_grammar_drafts_equal_plain(make_llm, drafting):
    """A grammar's masks hold at each position, and what it forces is accepted."""
    plain, llm = make_llm("smollm2", **SMALL), drafting("smollm2", "grammar")
    outputs = []
    for each in (plain, llm):
        state, requests = each.generator.prepare("g", [5, 6, 7], SamplingParams(temperature=0.8, seed=1, max_tokens=40))
        requests[0].grammar = compile_grammar(StructuredOutput(regex="(left|right) and then (up|down)"), Ascii())
        requests[0].needs_known_tokens = True
        each.generator.submit((state, requests))
        while not each.generator.output("g").finished:
            each.generator.step()
        outputs.append(each.generator.take("g"))
    assert_equal(outputs[1:], outputs[:1])
    assert llm.stats()["speculate.grammar.accepted"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculate": "oracle"}, "names 'oracle'; allowed, joined by commas: ngram, suffix"),
        ({"speculate": "ngram,ngram"}, "names ngram 2 times"),
        ({"speculate": "draft"}, "gives draft no checkpoint"),
        ({"speculate": "ngram:/x"}, "gives ngram the path '/x'"),
    ],
)
def test_bad_drafters_are_refused_before_loading(options, message):
    with pytest.raises(ConfigError, match=message):
        LLM(GOLDEN / "tiny" / "smollm2", **options)


def test_programs_that_verify_are_few_and_hold_every_plan():
    for running, tokens in [(1, 2), (8, 32), (64, 512), (256, 2048), (300, 301)]:
        buckets = make_buckets(running, tokens, MAX_DRAFTS)
        assert len(buckets.verify) <= 2 * len(buckets.decode) + 3
        assert len({sampler_name(bucket) for bucket in buckets.verify}) <= len(buckets.decode) + 4
        assert buckets.choose(tokens, running, False, width=2).width >= min(tokens, MANY_WIDTH)
        alone = buckets.choose(min(tokens, MAX_DRAFTS + 1), 1, False, width=min(tokens, MAX_DRAFTS + 1))
        assert alone.tokens <= max(16, tokens)
        assert make_buckets(running, tokens).all == buckets.decode + buckets.mixed


def test_cost_is_that_of_the_bucket_a_step_would_run_in():
    buckets = make_buckets(8, 64, MAX_DRAFTS)
    decode, small, large = Bucket(8, 8), Bucket(16, 8, 8), Bucket(64, 8, 8)
    cost = BucketCost(buckets)
    cost.at(5, 0)
    assert cost.estimate(5) is None
    for bucket, seconds in ((decode, 9.0), (decode, 1.0), (large, 7.9)):
        cost.record_step(bucket, seconds)
    assert cost.estimate(5) == cost.estimate(16) == cost.estimate(24) == 1.0  # first runs do not count
    cost.record_step(small, 9.0)
    assert cost.estimate(16) == 9.0  # but where drafts cannot pay,
    cost.record_step(small, 2.0)
    assert [cost.estimate(tokens) for tokens in (16, 24)] == [2.0, 5.0]  # and more cost half as much more, until known
    cost.record_step(large, 5.0)
    assert [cost.estimate(tokens) for tokens in (5, 6, 16, 17, 24)] == [1.0, 2.0, 2.0, 5.0, 5.0]
    for _ in range(600):
        cost.record_step(decode, 1.0)
    assert cost.estimate(24) == 3.0  # the large one has not run for long: half of what it cost more is forgotten,
    cost.record_step(large, 4.0)
    assert cost.estimate(24) == 4.0  # and the next run counts alone


def test_drafts_that_no_step_holds_never_pay():
    """Every way in which small options may leave less room than all rows' drafts would take."""
    for running, tokens in ((4, 16), (8, 32), (32, 33), (1, 2), (3, 5)):
        cost = BucketCost(make_buckets(running, tokens, MAX_DRAFTS))
        for sequences in range(1, running + 1):
            cost.at(sequences, 0)
            for bucket in cost._all.decode * 2:
                cost.record_step(bucket, 1.0)
            assert cost.estimate(tokens) < float("inf")
            assert cost.estimate(tokens + 1) == float("inf")


@pytest.mark.parametrize("slope", [0.1, 0.5, 0.9, 1.1])
@pytest.mark.parametrize("prefill", [0, 16])
def test_drafts_can_pay_exactly_where_certain_ones_would_be_taken(slope, prefill):
    buckets = make_buckets(32, 128, MAX_DRAFTS)
    cost = BucketCost(buckets, shards=2)
    for bucket in buckets.all * 2:
        cost.record_step(bucket, 1 + slope * bucket.tokens)
    for sequences, limits in [(1, [15]), (3, [7, 0, 2]), (5, [1] * 9), (17, [7] * 17), (32, [3] * 20)]:
        cost.at(sequences, prefill)
        certain = allot([[1.0] * limit for limit in limits], len(limits), cost)
        assert can_pay(limits, len(limits), cost) == any(certain), (sequences, limits)


def test_no_drafts_where_they_do_not_pay(make_llm):
    llm = make_llm("smollm2", **SMALL, speculate="ngram,grammar")
    cost = llm.engine.speculation.cost
    cost.estimate = lambda tokens: 1.0 if tokens <= cost._sequences else 100.0
    llm.generate([repetitive(random.Random(i)) for i in range(4)], greedy(30))
    assert accepted(llm) == 0
    assert "speculate.ngram.drafts" not in llm.stats()

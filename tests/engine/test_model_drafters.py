"""Models that draft: what they propose is what the published mathematics gives, and answers do not change."""

import json
import shutil

import numpy as np
import pytest

from tests.conftest import GOLDEN
from tests.engine.helpers import check_idle, greedy, tokens_of
from tests.engine.test_equalities import tight_memory
from tests.engine.test_speculation import accepted, assert_equal, in_batches, mixed
from trillion_infer import LLM, ConfigError, ModelLoadError, SamplingParams

pytestmark = pytest.mark.matrix

TINY = GOLDEN / "tiny"
SMALL = {"page_size": 8, "prefill_chunk": 32, "max_running": 4}
HEADS = {"eagle3_llama": "llama_deep", "eagle3_mla": "deepseek_v3", "mtp": "deepseek_v3_mtp"}


def flag(drafter: str) -> str:
    return drafter if drafter == "mtp" else f"eagle3:{TINY / drafter}"


@pytest.fixture(scope="module")
def drafting(make_llm):
    """drafting(model, speculate, **options): an LLM whose models draft at every step, whatever that costs."""

    def make(name: str, speculate: str, **options) -> LLM:
        llm = make_llm(name, **{**SMALL, **options}, speculate=speculate)
        llm.engine.speculation.cost.estimate = lambda tokens: 1.0
        return llm

    return make


def softmax_peak(logits: np.ndarray) -> np.ndarray:
    wide = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return 1.0 / wide.sum(axis=-1)


@pytest.mark.parametrize("drafter", HEADS)
def test_drafts_are_the_published_mathematics(drafting, drafter):
    """Chains after prompts in chunks and after decoded tokens: ids are equal, probabilities agree to 1e-4."""
    llm = drafting(HEADS[drafter], flag(drafter))
    golden = np.load(TINY / ("deepseek_v3_mtp/mtp.npz" if drafter == "mtp" else f"{drafter}/golden.npz"))
    found = {}
    speculation = llm.engine.speculation
    offer = speculation.offer

    def note(drafted):
        for request, ids, chances in zip(drafted.requests, drafted.tokens, drafted.chances, strict=True):
            if request is not None:
                found[tuple(request.known_ids())] = np.asarray(ids), np.asarray(chances)
        offer(drafted)

    speculation.offer = note
    try:
        for i in range(3):
            prompt = golden[f"prefix_{i}_0"][:-1].tolist()
            llm.generate(prompt, greedy(24))
    finally:
        speculation.offer = offer
    keys = [key.removeprefix("prefix_") for key in golden if key.startswith("prefix_")]
    assert len(keys) == 9
    for key in keys:
        ids, chances = found[tuple(golden[f"prefix_{key}"].tolist())]
        assert ids.tolist() == golden[f"draft_tokens_{key}"].tolist(), key
        np.testing.assert_allclose(chances, softmax_peak(golden[f"draft_logits_{key}"]), atol=1e-4, err_msg=key)


CASES = [
    *((target, flag(drafter), None) for drafter, target in HEADS.items()),
    ("smollm2", f"draft:{TINY / 'smollm2'}", None),
    ("deepseek_v3", f"draft:{TINY / 'smollm2'},ngram", None),
    ("gemma3_text", f"draft:{TINY / 'gemma3_text'}", None),
    ("smollm2", f"draft:{TINY / 'smollm2'}", "tensor=2"),
    ("deepseek_v3", flag("eagle3_mla"), "data=2,tensor=2"),
    ("llama_deep", flag("eagle3_llama"), "data=2,tensor=2"),
    ("deepseek_v3_mtp", "mtp", "tensor=2"),
]


@pytest.mark.matrix(1)
@pytest.mark.parametrize(("name", "speculate", "mesh"), CASES)
def test_model_drafts_equal_plain_and_compile_nothing(make_llm, drafting, name, speculate, mesh):
    """200 requests of every kind, greedy and drawn."""
    on_mesh = {"mesh": mesh} if mesh else {}
    plain, llm = make_llm(name, **SMALL), drafting(name, speculate, **on_mesh)
    requests = mixed(200)
    expected = in_batches(plain, *requests)
    compiled = llm.stats()["compilations"]
    assert_equal(in_batches(llm, *requests), expected)
    assert llm.stats()["compilations"] == compiled
    drafts = {key: value for key, value in llm.stats().items() if key.endswith(".drafts")}
    assert sum(drafts.values()) > 100
    check_idle(llm)


def test_a_drafter_that_is_its_target_is_always_right(drafting):
    """So its KV is that of the target at every position: after chunks, rejected drafts, and a prefix found."""
    llm = drafting("smollm2", f"draft:{TINY / 'smollm2'}")
    prompts = [[(7 * i + j) % 120 + 4 for j in range(45)] for i in range(6)]
    for _ in range(2):
        llm.engine.speculation._speculator.stats.by_drafter.clear()
        outputs = llm.generate(prompts, greedy(40))
        stats = llm.stats()
        assert stats["speculate.draft.accepted"] == stats["speculate.draft.proposed"] > 0
        prompts = [prompt + output.outputs[0].token_ids[:30] for prompt, output in zip(prompts, outputs, strict=True)]
    assert all(output.num_cached_tokens >= 40 for output in outputs)


def test_preempted_with_drafts_equals_plain(make_llm, drafting):
    speculate = f"draft:{TINY / 'smollm2'}"
    plain, roomy = make_llm("smollm2", **SMALL), make_llm("smollm2", **SMALL)
    tight = drafting("smollm2", speculate, max_model_len=112, kv_memory=2 * tight_memory(roomy, pages=26))
    tight.engine.schedulers[0]._lengths._prior = 1
    prompts = [[(5 * i + j) % 120 + 4 for j in range(30)] for i in range(8)]
    params = [SamplingParams(temperature=0.3, seed=i, max_tokens=40, ignore_eos=True) for i in range(8)]
    expected, before = plain.generate(prompts, params), accepted(tight)
    assert tokens_of(tight.generate(prompts, params)) == tokens_of(expected)
    assert tight.stats()["preemptions"] > 0
    assert accepted(tight) > before
    check_idle(tight)


def test_programs_and_memory_are_told(drafting):
    """One extend a bucket and one chain a number of rows, all compiled; the drafter's bytes have names of their own."""
    llm = drafting("smollm2", f"draft:{TINY / 'smollm2'}")
    programs = llm.engine.programs
    chains = {bucket.sequences for bucket in programs.buckets.all}
    assert llm.stats()["compilations"] >= len(programs.names()) + len(programs.buckets.all) + len(chains)
    memory = llm.memory()
    assert memory["drafter_draft"] == memory["weights"]
    assert memory["kv_draft"] == memory["kv_attention_full"]


def without(folder, tmp_path, *names: str):
    """A copy of a head that lacks some tensors."""
    from safetensors.numpy import load_file, save_file

    copy = tmp_path / "head"
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if k not in names}, copy / "model.safetensors")
    return copy


def changed(folder, tmp_path, **values):
    copy = tmp_path / "head"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **values}))
    return copy


def refuse(target: str, speculate: str, message: str, error=ConfigError, **options) -> None:
    with pytest.raises(error, match=message):
        LLM(TINY / target, dtype="float32", speculate=speculate, compile_cache="", **options)


def test_a_drafter_of_another_vocabulary_is_refused(tmp_path):
    other = changed(TINY / "smollm2", tmp_path, vocab_size=127)
    refuse("deepseek_v3", f"draft:{other}", "has a vocabulary of 127 and its target deepseek one of 128")


def test_a_head_of_another_width_is_refused():
    refuse("deepseek_v3", flag("eagle3_llama"), "hidden states of width 32 .*target deepseek has width 48")


def test_a_head_that_reads_layers_the_target_lacks_is_refused(tmp_path):
    eagle = {"eagle_aux_hidden_state_layer_ids": [1, 2, 30], "use_aux_hidden_state": True}
    head = changed(TINY / "eagle3_mla", tmp_path, eagle_config=eagle)
    refuse("deepseek_v3", f"eagle3:{head}", "after layers 1, 2, 30 and its target deepseek has 4 layers")


def test_a_head_with_missing_tensors_is_refused(tmp_path):
    head = without(TINY / "eagle3_llama", tmp_path, "fc.weight", "midlayer.hidden_norm.weight")
    refuse(
        "llama_deep", f"eagle3:{head}", "2 tensors are missing: fc.weight, midlayer.hidden_norm", error=ModelLoadError
    )


def test_mtp_of_a_checkpoint_without_it_is_refused():
    refuse("deepseek_v3", "mtp", "speculate names mtp, and this deepseek checkpoint has no MTP layer")


def test_a_draft_length_out_of_range_is_refused():
    for length in (0, 16, -1, True):
        refuse("smollm2", "ngram", f"draft_len is {length}; it must be a whole number from 1 to 15", draft_len=length)


def test_a_model_that_is_no_head_is_refused():
    refuse("llama_deep", f"eagle3:{TINY / 'smollm2'}", "LlamaForCausalLM is no EAGLE-3 head", error=Exception)

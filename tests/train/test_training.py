"""A head trained for a tiny target: it learns, goes on after a crash as if there had been none, and is what it was."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import GOLDEN
from tests.engine.helpers import greedy, tokens_of
from trillion_infer import ConfigError, SamplingParams
from trillion_infer.models.eagle3 import read_eagle3
from trillion_infer.train.answers import Answered, read_conversations, regenerate
from trillion_infer.train.data import batches, drafted_vocabulary, padded
from trillion_infer.train.export import describe, export_head
from trillion_infer.train.features import Features
from trillion_infer.train.head import begun, unrolled
from trillion_infer.train.start import trained_before
from trillion_infer.train.trainer import TrainConfig, Trainer, plot, read_metrics

TARGET = GOLDEN / "tiny" / "llama_deep"
CONFIG = TrainConfig(steps=12, rows=4, length=48, unroll=3, drafted=96, rate=5e-3, save_every=4)


def prompts(count: int = 24) -> list[dict]:
    return [{"prompt_token_ids": [(7 * i + j) % 120 + 4 for j in range(6 + i % 5)]} for i in range(count)]


@pytest.fixture(scope="module")
def target(make_llm):
    return make_llm("llama_deep", page_size=8, prefill_chunk=32, precompile=False)


@pytest.fixture(scope="module")
def examples(target, tmp_path_factory) -> list[Answered]:
    out = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    return regenerate(target, prompts(), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), out)


@pytest.fixture(scope="module")
def trained(target, examples, tmp_path_factory) -> Trainer:
    trainer = Trainer(target, str(TARGET), examples, CONFIG, tmp_path_factory.mktemp("trained"))
    trainer.run()
    return trainer


def test_answers_are_the_targets_own_and_survive_a_cut(target, examples, tmp_path):
    out = tmp_path / "answers.jsonl"
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    assert regenerate(target, prompts(), params, out, batch=10) == examples
    whole = out.read_bytes()
    out.write_bytes(whole[: len(whole) // 2])
    assert regenerate(target, prompts(), params, out) == examples
    assert out.read_bytes() == whole


def test_shards_share_the_examples_and_the_order_goes_on():
    rows = [Answered([i, i], [i] * 5) for i in range(16)]
    seen = [set(), set()]
    for shard in range(2):
        data = batches(rows, 2, 12, seed=3, shard=shard, shards=2)
        for _ in range(4):
            seen[shard].update(next(data)["tokens"][:, 0].tolist())
        state, after = data.get_state(), next(data)["tokens"]
        again = batches(rows, 2, 12, seed=3, shard=shard, shards=2)
        again.set_state(json.loads(json.dumps(state)))
        assert np.array_equal(next(again)["tokens"], after)
    assert seen == [set(range(0, 16, 2)), set(range(1, 16, 2))]


def test_the_drafted_vocabulary_holds_what_answers_use_most():
    rows = [Answered([9, 9], [5, 5, 5, 3, 3, 7])]
    assert drafted_vocabulary(rows, 10, 4).tolist() == [0, 3, 5, 7]


def test_the_loss_falls(trained):
    rows = read_metrics(trained.folder)
    assert [row["step"] for row in rows] == list(range(1, CONFIG.steps + 1))
    losses = [row["loss"] for row in rows]
    assert sum(losses[-4:]) < sum(losses[:4])
    assert plot(trained.folder).stat().st_size > 1000


def test_states_kept_in_a_file_are_those_computed(trained, examples, tmp_path):
    """Three more than fill a whole batch; a file that is there is read, and one cut short is completed."""
    tokens = np.stack([padded(each, CONFIG.length, 0)["tokens"] for each in examples[:7]])
    path, chosen = tmp_path / "states.bin", np.array([6, 0, 3, 5])
    kept = Features(trained._target, "t", tokens, path, 2**30)
    streamed = Features(trained._target, "t", tokens, path, 0)
    assert (kept.stored, streamed.stored) == (True, False)
    for ours, theirs in zip(kept(chosen), streamed(chosen), strict=True):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), atol=1e-5)
    made = path.stat().st_mtime_ns
    assert Features(trained._target, "t", tokens, path, 2**30).stored
    assert path.stat().st_mtime_ns == made
    mark = path.with_suffix(".json")
    mark.write_text(json.dumps({**json.loads(mark.read_text()), "done": 4}))
    np.memmap(path, np.float32, "r+").reshape(7, -1)[4:] = 0
    again = Features(trained._target, "t", tokens, path, 2**30)
    np.testing.assert_allclose(np.asarray(again(chosen)[0]), np.asarray(streamed(chosen)[0]), atol=1e-5)


def test_states_of_more_examples_are_added_to_those_kept(trained, examples, tmp_path):
    tokens = np.stack([padded(each, CONFIG.length, 0)["tokens"] for each in examples[:7]])
    path, chosen = tmp_path / "states.bin", np.arange(4)
    Features(trained._target, "t", tokens[:4], path, 2**30)
    np.memmap(path, np.float32, "r+")[0] = 123.0
    more, streamed = (Features(trained._target, "t", tokens, path, limit) for limit in (2**30, 0))
    assert float(more(chosen)[0][0, 0, 0]) == 123.0, "computed again"
    np.testing.assert_allclose(*(np.asarray(each(chosen + 3)[0]) for each in (more, streamed)), atol=1e-5)
    others = Features(trained._target, "t", tokens[::-1], path, 2**30)
    np.testing.assert_allclose(np.asarray(others(6 - chosen)[0]), np.asarray(streamed(chosen)[0]), atol=1e-5)


def test_training_goes_on_from_an_exported_head(trained, target, examples, tmp_path):
    export_head(tmp_path / "head", trained.spec, trained.weights, trained.kept)
    more = Trainer(
        target, str(TARGET), examples, replace(CONFIG, steps=2, drafted=80), tmp_path, start=tmp_path / "head"
    )
    assert (more.spec, more.kept.tolist()) == (trained.spec, trained.kept.tolist())
    for name, value in trained.weights.items():
        assert np.array_equal(more.weights[name], value), name
    more.run()
    assert read_metrics(tmp_path)[0]["loss"] < read_metrics(trained.folder)[0]["loss"]


def test_a_head_that_cannot_be_gone_on_with_is_refused(trained, target, tmp_path):
    export_head(tmp_path, trained.spec, trained.weights, trained.kept)
    config = json.loads((tmp_path / "config.json").read_text())
    for name, value, message in [
        ("vocab_size", 999, "a vocabulary of 999"),
        ("draft_vocab_size", 80, "describes a head that has it"),
        ("num_attention_heads", 2, "describes a head that has it"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps({**config, name: value}))
        with pytest.raises(ConfigError, match=message):
            trained_before(tmp_path, target.model_config)


def test_chains_begin_behind_what_the_one_before_gave():
    lengths = [[3, 1, 4, 2, 1, 1, 2], [1, 2, 4, 1, 1, 1, 1]]
    places = np.asarray(begun(np.array(lengths, np.float32)))
    assert [np.flatnonzero(row).tolist() for row in places] == [[0, 3, 5, 6], [0, 1, 3, 4, 5, 6]]


def test_the_exported_head_is_read_as_it_was_trained(trained, tmp_path):
    from safetensors.numpy import load_file

    export_head(tmp_path, trained.spec, trained.weights, trained.kept)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, value in trained.weights.items():
        assert np.array_equal(tensors[name], np.asarray(value)), name
    assert (tensors["d2t"] + np.arange(len(trained.kept))).tolist() == np.flatnonzero(tensors["t2d"]).tolist()
    assert read_eagle3(json.loads((tmp_path / "config.json").read_text()), list(tensors)) == trained.spec
    assert describe(trained.spec, "float32")["draft_vocab_size"] == CONFIG.drafted


def test_the_head_drafts_in_the_engine_as_it_does_in_training(trained, target, make_llm, tmp_path):
    """The training-time test, given what a chain of the engine drafted as the text, calls each token right."""
    export_head(tmp_path / "head", trained.spec, trained.weights, trained.kept)
    llm = make_llm.fresh(
        "llama_deep", page_size=8, prefill_chunk=32, speculate=f"eagle3:{tmp_path / 'head'}", draft_len=3
    )
    llm.engine.speculation.draft_always()
    chains = {}
    offer = llm.engine.speculation.offer

    def note(drafted):
        for request, ids in zip(drafted.requests, np.asarray(drafted.tokens).tolist(), strict=True):
            if request is not None:
                chains[len(request.known_ids())] = ids
        offer(drafted)

    llm.engine.speculation.offer = note
    prompt = prompts(1)[0]["prompt_token_ids"]
    output = llm.generate(prompt, greedy(30))[0]
    assert tokens_of([output]) == tokens_of(target.generate(prompt, greedy(30)))
    example = Answered(prompt, output.outputs[0].token_ids)
    rows = next(batches([example] * 4, 4, CONFIG.length, 0))
    text = rows["tokens"].copy()
    for known in sorted(chains)[::4]:
        rows["tokens"] = text.copy()
        rows["tokens"][:, known : known + 3] = chains[known]
        rows |= {"answers": np.full(4, known - 1), "lengths": np.full(4, known + 3)}
        _, drafted = unrolled(trained.weights, trained.spec, trained.ends, trained.batch(rows), 3, window=1)
        assert drafted.right.tolist() == [1.0] * 3, (known, chains[known])
    llm.close()


KILLED = """
import sys
import tests.conftest
from tests.train.test_training import CONFIG, TARGET, prompts
from trillion_infer import LLM, SamplingParams
from trillion_infer.train.answers import regenerate
from trillion_infer.train.trainer import Trainer
from pathlib import Path
folder = Path(sys.argv[1])
llm = LLM(TARGET, dtype="float32", max_running=8, kv_memory=16 * 2**20, page_size=8, prefill_chunk=32, precompile=False)
params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
examples = regenerate(llm, prompts(), params, folder / "answers.jsonl")
Trainer(llm, str(TARGET), examples, CONFIG, folder).run(lambda row: print(row["step"], flush=True))
"""


def test_killed_and_run_again_gives_the_same_losses(trained, tmp_path):
    """SIGKILL in the middle, twice at different steps; the third run ends it."""
    for last in (6, 9, None):
        command = [sys.executable, "-c", KILLED, str(tmp_path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
        assert process.stdout is not None
        for line in process.stdout:
            if last is not None and int(line) >= last:
                os.kill(process.pid, signal.SIGKILL)
                break
        process.stdout.close()
        assert process.wait(timeout=300) == (0 if last is None else -signal.SIGKILL)
        time.sleep(0.1)
    found, expected = read_metrics(tmp_path), read_metrics(trained.folder)
    assert [(row["step"], row["loss"], row["right"]) for row in found] == [
        (row["step"], row["loss"], row["right"]) for row in expected
    ]


def test_bad_prompts_and_sizes_are_refused(tmp_path):
    path = tmp_path / "p.jsonl"
    for text, message in [("", "holds no conversation"), ('{"a": 1}', "line 1 has no messages"), ("{", "is not JSON")]:
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_conversations(path)
    for bad in ({"steps": 0}, {"length": 8}, {"rate": 0.0}):
        with pytest.raises(ConfigError, match=f"{next(iter(bad))} is"):
            TrainConfig(**bad)
    with pytest.raises(ConfigError, match="fewer than the 4 rows"):
        batches([Answered([1, 2], [3, 4, 5])], 4, 16, 0)

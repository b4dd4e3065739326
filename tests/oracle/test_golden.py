"""The committed golden files hold what the README promises, and stay small."""

import json
from pathlib import Path

import numpy as np
import pytest

GOLDEN = Path(__file__).parent / "golden"
TINY = sorted(path.parent for path in GOLDEN.glob("tiny/*/config.json"))
RUNS = [folder for folder in TINY if not folder.name.startswith("eagle3")]
REAL = [GOLDEN / "smollm2", GOLDEN / "gemma3_270m"]
MIB = 2**20


def test_golden_files_stay_under_12_mib() -> None:
    sizes = {path: path.stat().st_size for path in GOLDEN.rglob("*") if path.is_file()}
    assert sum(sizes.values()) < 12 * MIB, sorted(sizes.items(), key=lambda item: -item[1])[:5]


@pytest.mark.parametrize("folder", TINY, ids=lambda folder: folder.name)
def test_tiny_weights_stay_under_400_kb(folder: Path) -> None:
    assert (folder / "model.safetensors").stat().st_size < 400_000


@pytest.mark.parametrize("folder", RUNS, ids=lambda folder: folder.name)
def test_tiny_runs_are_greedy_and_far_from_ties(folder: Path) -> None:
    with np.load(folder / "golden.npz") as golden:
        for i in range(3):
            logits, rows, tokens = golden[f"logits_{i}"], golden[f"token_logits_{i}"], golden[f"tokens_{i}"]
            assert len(logits) == len(golden[f"prompt_{i}"])
            assert np.array_equal(rows[0], logits[-1])
            assert np.array_equal(rows.argmax(-1), tokens)
            assert golden[f"gaps_{i}"].min() >= 2e-3


@pytest.mark.parametrize("folder", REAL, ids=lambda folder: folder.name)
def test_real_runs_have_a_row_for_every_prompt(folder: Path) -> None:
    entries = json.loads((folder / "prompts.json").read_text(encoding="utf-8"))
    with np.load(folder / "golden.npz") as golden:
        offsets = golden["prompt_offsets"]
        assert golden["tokens"].shape == golden["gaps"].shape == golden["token_logprobs"].shape == (len(entries), 48)
        assert np.diff(offsets).tolist() == [len(entry["ids"]) for entry in entries]
        assert len(golden["prompt_logprobs"]) == offsets[-1]
        assert (golden["prompt_logprobs"] <= 0).all()


def test_smollm2_prompts_reach_from_1_to_3000_tokens() -> None:
    entries = json.loads((GOLDEN / "smollm2" / "prompts.json").read_text(encoding="utf-8"))
    lengths = [len(entry["ids"]) for entry in entries]
    assert len(entries) >= 32
    assert (min(lengths), max(lengths)) == (1, 3000)
    assert {entry["kind"] for entry in entries} == {"text", "code", "korean", "chat", "long"}

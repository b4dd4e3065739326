"""What every oracle script shares: teacher-forced logits, greedy decoding, and writing of golden files.

Letters: n prompt tokens, V vocabulary, d decoded tokens.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

GOLDEN = Path(__file__).parent / "golden"
DECODE_STEPS = 48


@dataclass(frozen=True)
class Trace:
    """One greedy run: `logits [n, V]` of the prompt, then `tokens [d]` and the logits `[d, V]` that chose them."""

    prompt: np.ndarray
    logits: np.ndarray
    tokens: np.ndarray
    token_logits: np.ndarray

    @property
    def gaps(self) -> np.ndarray:
        """Top-two difference in logits (equal to that in log-probability) at each decoded step, `[d]`."""
        top = np.sort(self.token_logits, axis=-1)
        return top[:, -1] - top[:, -2]


@torch.no_grad()
def greedy(model: torch.nn.Module, prompt: list[int], steps: int = DECODE_STEPS) -> Trace:
    """Runs the prompt in one forward pass, then `steps` greedy tokens with the model's own cache; stops are ignored."""
    out = model(input_ids=torch.tensor([prompt]), use_cache=True)
    logits, cache, last = out.logits[0], out.cache, out.logits[0, -1]
    tokens, rows = [], []
    for step in range(steps):
        rows.append(last)
        tokens.append(int(last.argmax()))
        if step + 1 < steps:
            out = model(input_ids=torch.tensor([[tokens[-1]]]), cache=cache, use_cache=True)
            cache, last = out.cache, out.logits[0, -1]
    return Trace(
        np.array(prompt, np.int32),
        logits.float().numpy(),
        np.array(tokens, np.int32),
        torch.stack(rows).float().numpy(),
    )


def prompt_logprobs(logits: np.ndarray, prompt: np.ndarray) -> np.ndarray:
    """Log-probability of `prompt[i]` given what stands before it, `[n]`; entry 0 is 0 because nothing does."""
    out = np.zeros(len(prompt), np.float32)
    for i in range(1, len(prompt)):
        row = torch.from_numpy(logits[i - 1]).double()
        out[i] = float(row[prompt[i]] - row.logsumexp(0))
    return out


def save_npz(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes a compressed .npz; object arrays are refused, so that no reader needs pickle."""
    for name, array in arrays.items():
        if np.asarray(array).dtype == object:
            raise TypeError(f"{name} has dtype object; give a numeric array")
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **arrays)


def save_json(path: Path, value: dict | list) -> None:
    """Writes JSON, Korean as itself, one entry of the outermost list or object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(value, dict):
        entries = [f"{json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in value.items()]
        text = "{\n" + ",\n".join(entries) + "\n}\n"
    else:
        text = "[\n" + ",\n".join(json.dumps(v, ensure_ascii=False) for v in value) + "\n]\n"
    path.write_text(text, encoding="utf-8")


def first_good_seed(build: Callable[[int], tuple[torch.nn.Module, list[Trace]]], min_gap: float, tries: int = 40):
    """Tries seeds 0, 1, … until no decoded step of `build(seed)` is closer than `min_gap` to a tie.

    Returns `(seed, model, traces)`; raises when no seed of `tries` will do.
    """
    for seed in range(tries):
        model, traces = build(seed)
        if min(float(trace.gaps.min()) for trace in traces) >= min_gap:
            return seed, model, traces
    raise RuntimeError(f"no seed below {tries} keeps every top-two gap above {min_gap}; lower it or spread the weights")

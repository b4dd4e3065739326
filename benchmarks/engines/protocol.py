"""What every engine's script does: read the work, run it, print a JSON object a figure.

Scripts run in interpreters of their own, so this file needs nothing but the standard library. See
tests/oracle/torch_baseline.py for the form of the work and of the lines.
"""

import argparse
import json
import os
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol


class Model(Protocol):
    """An engine with a model loaded."""

    def run(self, prompts: Sequence[Sequence[int]], out: int, running: int) -> list[float]:
        """Answers every prompt with exactly `out` tokens, greedily, at most `running` at once. Returns
        `time.perf_counter()` at the start, after the first token of a single prompt, and at the end."""
        ...


def main(engine: str, doc: str, load: Callable[[argparse.Namespace], Model]) -> None:
    """Parses the flags, loads once, measures what the work names. Best of `--repeats` after a warm-up."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--model", required=True)
    parser.add_argument("--work", required=True, help="JSON file of token ids by workload")
    parser.add_argument("--dtype", choices=["bf16", "f32"], default="bf16")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    work = json.loads(Path(args.work).read_text(encoding="utf-8"))
    figures = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what an engine says goes to stderr, whatever it takes for its log

    def emit(metric: str, value: float, unit: str) -> None:
        line = {"engine": engine, "metric": metric, "value": round(value, 3), "unit": unit, "dtype": args.dtype}
        print(json.dumps({**line, "model": Path(args.model).name}), file=figures, flush=True)

    measure(load(args), work, args.repeats, emit)


def measure(model: Model, work: dict[str, Any], repeats: int, emit: Callable[[str, float, str], None]) -> None:
    """Figures of every workload that the work holds; start-up is not among them."""
    model.run([list(range(100, 132))], 4, 1)
    if "decode" in work:
        prompt, out = work["decode"]["prompt_ids"], work["decode"]["out"]
        speeds = []
        for _ in range(repeats):
            _, first, end = model.run([prompt], out, 1)
            speeds.append((out - 1) / (end - first))
        emit("decode_tok_s", max(speeds), "tokens/s")
    if "prefill" in work:
        prompt = work["prefill"]["prompt_ids"]
        seconds = min(_seconds(model, [prompt], 1, 1) for _ in range(repeats))
        emit("prefill_tok_s", len(prompt) / seconds, "tokens/s")
    if "offline" in work:
        prompts, out, running = (work["offline"][name] for name in ("prompts", "out", "running"))
        seconds = min(_seconds(model, prompts, out, running) for _ in range(repeats))
        total = out * len(prompts)
        emit("offline_out_tok_s", total / seconds, "tokens/s")
        emit("offline_total_tok_s", (total + sum(map(len, prompts))) / seconds, "tokens/s")
    emit("peak_rss_mb", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "MB")


def _seconds(model: Model, prompts: Sequence[Sequence[int]], out: int, running: int) -> float:
    start, _, end = model.run(prompts, out, running)
    return end - start

"""A server whose model is instant, or as slow as it is told, in a process of its own: for load on everything else.

python -m trillion_infer.testing.scripted_server '{"options": {"step_ms": 10, "max_running": 64}, "port": 8000}'

options: step_ms, what a step takes at least; max_running; marks, a file of `make_marks` that gets the
`time.monotonic()` at which the engine gave token i of a prompt of n tokens, at [n, i]. "cores": those it may use.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

MAX_MODEL_LEN = 2048
MODEL = "benchmark"


def letters(index: int, prompt_len: int) -> int:
    """Tokens by their number and the prompt's length, so that streams are told apart."""
    return 97 + (index + prompt_len) % 26


def make_marks(path: str | Path) -> np.ndarray:
    """An empty float64 table [prompt tokens, token] in a file, mapped into memory (most of it is never touched)."""
    return np.memmap(path, np.float64, "w+", shape=(MAX_MODEL_LEN, MAX_MODEL_LEN))


class Paced:
    """Steps of a Generator that take `pause` seconds at least; tells `marks` when each token was given."""

    def __init__(self, generator: Any, pause: float, marks: str | None):
        self._generator, self._step, self._pause = generator, generator.step, pause
        shape = (MAX_MODEL_LEN, MAX_MODEL_LEN)
        self._marks = None if marks is None else np.memmap(marks, np.float64, "r+", shape=shape)

    def __call__(self) -> list[Any]:
        begun = time.monotonic()
        deltas = self._step()
        places = [] if self._marks is None else [self._place(delta) for delta in deltas]
        time.sleep(max(0.0, begun + self._pause - time.monotonic()))
        now = time.monotonic()
        for prompt_len, start, end in places:
            self._marks[prompt_len, start:end] = now  # pyright: ignore[reportOptionalSubscript]
        return deltas

    def _place(self, delta: Any) -> tuple[int, int, int]:
        """Prompt length, and the numbers of the first token of a delta and of the one behind its last."""
        output = self._generator.output(delta.request_id)
        end = len(output.outputs[delta.index].token_ids)
        return len(output.prompt_token_ids), end - len(delta.token_ids), end


def serve_script(options: dict[str, Any], port: int) -> None:
    """Serves until SIGTERM."""
    from trillion_infer.serve.options import ServerOptions
    from trillion_infer.serve.run import serve
    from trillion_infer.testing.byte_tokenizer import byte_tokenizer
    from trillion_infer.testing.scripted import scripted_generator

    running = options.get("max_running", 64)
    generator = scripted_generator(
        letters,
        byte_tokenizer(),
        max_running=running,
        max_model_len=MAX_MODEL_LEN,
        num_pages=running * 32 + 512,
        prefill_chunk=512,
    )
    generator.step = Paced(generator, options.get("step_ms", 0) / 1e3, options.get("marks"))
    serve(generator, ServerOptions(MODEL), "127.0.0.1", port, drain_s=5)


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    if request.get("cores"):
        os.sched_setaffinity(0, request["cores"])
    serve_script(request["options"], request["port"])

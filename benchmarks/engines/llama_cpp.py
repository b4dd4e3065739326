"""llama.cpp through llama-cpp-python, on the GGUF as it is: its weights stay quantised. Prompts run one by one, since
the binding answers one at a time."""

import argparse
import os
import time
from collections.abc import Sequence

from protocol import main


class LlamaCpp:
    """One context of 2,048 tokens, all cores."""

    def __init__(self, args: argparse.Namespace):
        from llama_cpp import Llama

        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self._llama = Llama(
            model_path=args.model, n_ctx=2048, n_batch=512, n_threads=cores, n_threads_batch=cores, verbose=False
        )

    def run(self, prompts: Sequence[Sequence[int]], out: int, running: int) -> list[float]:
        start = time.perf_counter()
        first = None
        for prompt in prompts:
            self._llama.reset()
            for count, _ in enumerate(self._llama.generate(list(prompt), temp=0.0, repeat_penalty=1.0), start=1):
                first = first or time.perf_counter()
                if count == out:
                    break
        assert first is not None
        return [start, first, time.perf_counter()]


if __name__ == "__main__":
    main("llama_cpp", __doc__ or "", LlamaCpp)

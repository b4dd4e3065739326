"""llama.cpp in the process, by xllamacpp's wheel: the engine of its server, called without HTTP.

Settings are llama.cpp's best where they were tried (two cores, AVX2): a thread a core, flash attention, a KV buffer of
its own for each slot, prompts in batches of 512. For 16-bit weights give a GGUF in float16 (benchmarks/float_gguf.py):
without AVX512-BF16 its bfloat16 products are half as fast.
"""

import argparse
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from protocol import main


class LlamaCpp:
    """Requests run at once in as many slots (continuous batching)."""

    def __init__(self, args: argparse.Namespace):
        self._model = args.model
        self._server: Any = None
        self._shape = (0, 0)

    def run(self, prompts: Sequence[Sequence[int]], out: int, running: int) -> list[float]:
        slots, longest = min(running, len(prompts)), max(map(len, prompts)) + out
        self._prepare(slots, (longest + 256) // 256 * 256)
        with ThreadPoolExecutor(slots) as pool:
            start = time.perf_counter()
            answers = list(pool.map(lambda prompt: self._answer(list(prompt), out), prompts))
            end = time.perf_counter()
        # It counts the time of the tokens after the first itself.
        return [start, end - answers[-1]["timings"]["predicted_ms"] / 1e3, end]

    def _prepare(self, slots: int, context: int) -> None:
        """Loads the model with so many slots of so many tokens, unless it is loaded so."""
        import xllamacpp

        if self._shape == (slots, context):
            return
        self._server = None  # before the next: their memory would add up
        params = xllamacpp.CommonParams()
        params.model.path = self._model
        params.n_parallel, params.n_ctx = slots, slots * context
        params.n_batch, params.n_ubatch, params.kv_unified = 2048, 512, False
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = cores
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.warmup, params.verbosity = True, 1
        self._server = xllamacpp.Server(params)
        self._shape = (slots, context)

    def request(self, prompt: list[int], out: int) -> dict[str, Any]:
        """What is asked of llama.cpp."""
        asked = {"prompt": prompt, "n_predict": out, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        return {**asked, "max_tokens": out}

    def ask(self, server: Any, request: dict[str, Any]) -> dict[str, Any]:
        """llama.cpp's answer."""
        return server.handle_completions(request)

    def _answer(self, prompt: list[int], out: int) -> dict[str, Any]:
        answer = self.ask(self._server, self.request(prompt, out))
        made = answer.get("usage", {}).get("completion_tokens")
        if made != out:
            raise RuntimeError(f"llama.cpp made {made} tokens where {out} were asked for: {answer}")
        return answer


if __name__ == "__main__":
    main("llama_cpp", __doc__ or "", LlamaCpp)

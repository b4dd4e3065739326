"""vLLM on the CPU, with 1 GiB for KV. The model must be a Hugging Face folder: vLLM's support of GGUF files is partial.

It runs in this process (no engine process of its own), so that its peak memory is seen.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).parent]  # not this file
for _name, _value in {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}.items():
    os.environ.setdefault(_name, _value)

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.inputs import TokensPrompt  # noqa: E402

sys.path.append(str(Path(__file__).parent))
from protocol import main  # noqa: E402


class Vllm:
    """Prefix caching off: every prompt is computed."""

    def __init__(self, args: argparse.Namespace):
        dtype = {"bf16": "bfloat16", "f32": "float32"}[args.dtype]
        # Token ids in, token ids out: a folder without a tokenizer serves.
        self._llm = LLM(
            model=args.model, dtype=dtype, max_model_len=2048, enable_prefix_caching=False, skip_tokenizer_init=True
        )

    def run(self, prompts: Sequence[Sequence[int]], out: int, running: int) -> list[float]:
        params = SamplingParams(temperature=0, max_tokens=out, ignore_eos=True, detokenize=False)
        inputs = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
        start = time.perf_counter()
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        end = time.perf_counter()
        metrics = getattr(outputs[0], "metrics", None)
        latency = getattr(metrics, "first_token_latency", None)
        if latency is None:
            alone = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
            begun = time.perf_counter()
            self._llm.generate(inputs[:1], alone, use_tqdm=False)
            latency = time.perf_counter() - begun
        return [start, start + latency, end]


if __name__ == "__main__":
    main("vllm", __doc__ or "", Vllm)

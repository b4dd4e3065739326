"""Llama-3-8B and Qwen3-30B-A3B with random weights on the GPU that is here: shares of its bandwidth and FLOP.

Run:    python benchmarks/gpu.py                     # an H100 or H200; about ten minutes, compiles included
        python benchmarks/gpu.py --models=llama3_8b --bundle=bundles
        JAX_PLATFORMS=cpu python benchmarks/gpu.py --tiny
Expect: a JSON line a case: decode_tok_s and prefill_tok_s, and on known devices decode_bandwidth_share (weights, chosen
        experts and KV once a step, over the memory's bandwidth) and prefill_flops_share. Goals: 0.7 and 0.5.
"""

import json
import sys
import time

from absl import flags

from configs.qwen3_30b_a3b_v5e_8 import HF_CONFIG as QWEN3_30B_A3B
from trillion_infer.benchmark.roofline import CASES, LLAMA3_8B, TINY_CASES, run_model
from trillion_infer.cli.flags import run
from trillion_infer.core.errors import ConfigError
from trillion_infer.testing.tiny_models import tiny_config

MODELS = {"llama3_8b": LLAMA3_8B, "qwen3_30b_a3b": QWEN3_30B_A3B}
TINY = {"llama3_8b": tiny_config("llama"), "qwen3_30b_a3b": tiny_config("qwen3_moe")}

NAMES = flags.DEFINE_list("models", list(MODELS), "Which to run, with commas.")
TINY_FLAG = flags.DEFINE_bool("tiny", False, "Tiny models of the same families, on any device.")
SECONDS = flags.DEFINE_integer("seconds", 540, "No model is begun later than this.")
BUNDLE = flags.DEFINE_string("bundle", None, "Folder of executable bundles, as LLM's.")


def main(_: list[str]) -> None:
    unknown = [name for name in NAMES.value if name not in MODELS]
    if unknown:
        raise ConfigError(f"model {unknown[0]!r} is unknown; there are {', '.join(MODELS)}.")
    begun = time.monotonic()
    options = {"dtype": "float32" if TINY_FLAG.value else "bfloat16", "bundle": BUNDLE.value}
    options["prefill_chunk"] = 32 if TINY_FLAG.value else 1024
    for name in NAMES.value:
        if time.monotonic() - begun > SECONDS.value:
            print(f"notice: {name} is left out: {SECONDS.value} s have passed", file=sys.stderr)
            continue
        model, cases = (TINY, TINY_CASES) if TINY_FLAG.value else (MODELS, CASES)
        for line in run_model(name, model[name], cases, options):  # pyright: ignore[reportArgumentType]
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    run(main)

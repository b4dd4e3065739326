"""Answers a question with real weights: what `make demo` runs.

Run:    python scripts/demo.py --prompt="What is the capital of France?"
Expect: SmolLM2-135M-Instruct (fetched once, 93 MB) answers that it is Paris, then a line of figures.
"""

import time

from absl import flags

from trillion_infer import LLM, SamplingParams
from trillion_infer.cli.flags import run
from trillion_infer.cli.progress import progress_bars
from trillion_infer.weights.fetch import fetch_smollm2

PROMPT = flags.DEFINE_string("prompt", "What is the capital of France?", "What to ask.")
MAX_TOKENS = flags.DEFINE_integer("max_tokens", 256, "Longest answer, in tokens.")


def main(_: list[str]) -> None:
    start = time.monotonic()
    with progress_bars() as progress:
        path = fetch_smollm2(lambda done, total: progress("fetch", done, total))
        llm = LLM(path, config="smollm2_cpu", progress=progress)
    ready = time.monotonic()
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS.value)
    answer = llm.stream_chat([{"role": "user", "content": PROMPT.value}], params)
    for piece in answer:
        print(piece, end="", flush=True)
    metrics, tokens = answer.output.metrics, len(answer.output.outputs[0].token_ids)
    span = (metrics.last_token_time or 0) - (metrics.first_token_time or 0)
    speed = f"{(tokens - 1) / span:.0f} tokens/s" if span > 0 else "one token"
    print(
        f"\n\n{tokens} tokens; ready in {ready - start:.1f} s; "
        f"time to first token {metrics.time_to_first_token:.2f} s; then {speed}"
    )


if __name__ == "__main__":
    run(main)

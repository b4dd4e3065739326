"""Measures what rounding weights or KV costs: perplexity and divergence from a reference on a text.

Run:    python scripts/quality.py --model=MODEL --dtype=float32 \
            --variants="dtype=bfloat16;quantize=int8;quantize=int4;kv_dtype=int8"
        python scripts/quality.py --model=MODEL --text=FILE.txt --variants="quantize=int4_64" --json
Expect: a line for the reference (the flags as given) and one a variant: perplexity, its ratio to the reference's, KL a
token in nats, share of positions with the same likeliest token, and megabytes of weights.
"""

import json
from dataclasses import asdict
from pathlib import Path

from absl import flags

from trillion_infer.benchmark.quality import parse_variants, run_variants, shipped_text
from trillion_infer.cli.flags import define_llm_flags, run

VARIANTS = flags.DEFINE_string(
    "variants", "dtype=bfloat16;quantize=int8;quantize=int4", "Keywords of LLM by variant: a=b,c=d;a=e"
)
TEXT = flags.DEFINE_string("text", None, "File of plain text; default: the text that comes with the library.")
JSON = flags.DEFINE_bool("json", False, "One JSON object a line.")
llm_flags = define_llm_flags(max_running=4, kv_memory=float(1 << 28), max_model_len=1024, precompile=False)


def main(_: list[str]) -> None:
    text = Path(TEXT.value).read_text(encoding="utf-8") if TEXT.value else shipped_text()
    for row in run_variants(llm_flags(), parse_variants(VARIANTS.value), text):
        if JSON.value:
            print(json.dumps(asdict(row)), flush=True)
            continue
        print(
            f"{row.variant:<32} perplexity {row.perplexity:8.4f} ({row.ratio:.4f})  KL {row.kl:.5f}  "
            f"same best {row.agreement:.3f}  weights {row.weights_mb:.1f} MB  ({row.tokens} tokens)",
            flush=True,
        )


if __name__ == "__main__":
    run(main)

"""Plan KV capacity: replay a request trace through the prefix cache at several sizes and policies.

    python scripts/plan.py --trace=conversation_trace.jsonl --policy=value --plot=hit_rate.png

prints a line per size with the share of prompt tokens found in the cache, for the policy, for LRU and for infinite
memory. `--json` prints one JSON object a line instead.
"""

import json
import sys

from absl import app, flags

from trillion_infer.cache.eviction import POLICIES
from trillion_infer.cli.flags import run
from trillion_infer.core.errors import TrillionInferError
from trillion_infer.plan.trace import Replay, compare, gap_closed, load_trace, plot

TRACE = flags.DEFINE_string("trace", None, "JSONL file of requests with input_length and hash_ids.", required=True)
POLICY = flags.DEFINE_enum("policy", next(iter(POLICIES)), list(POLICIES), "Eviction policy to compare with lru.")
SIZES = flags.DEFINE_list("sizes", ["1000", "3000", "10000", "30000", "100000"], "Pool sizes in blocks.")
PLOT = flags.DEFINE_string("plot", None, "Image to write; needs matplotlib.")
JSON = flags.DEFINE_bool("json", False, "One JSON object a line.")


def show(run: Replay) -> None:
    if JSON.value:
        row = {"policy": run.policy, "blocks": run.num_blocks, "hit_rate": run.hit_rate, "evictions": run.evictions}
        print(json.dumps(row), flush=True)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"Arguments {argv[1:]} are not flags.")
    try:
        sizes = [int(size) for size in SIZES.value]
    except ValueError:
        raise app.UsageError(f"--sizes={','.join(SIZES.value)} must be whole numbers, comma separated.") from None
    try:
        *runs, infinite = compare(load_trace(TRACE.value), list({POLICY.value: 0, "lru": 0}), sizes, show)
    except TrillionInferError as error:
        sys.exit(f"plan.py: {error}")
    if not JSON.value:
        print(f"{'blocks':>8} {POLICY.value:>8} {'lru':>8} {'infinite':>8} {'gap closed':>10}")
        for size in sizes:
            mine, lru = (next(r for r in runs if (r.num_blocks, r.policy) == (size, p)) for p in (POLICY.value, "lru"))
            closed = gap_closed(mine, lru, infinite)
            rates = f"{mine.hit_rate:8.4f} {lru.hit_rate:8.4f} {infinite.hit_rate:8.4f}"
            print(f"{size:8d} {rates} {closed:10.1%}")
    if PLOT.value and not plot([*runs, infinite], PLOT.value):
        print("plan.py: no plot, matplotlib is not installed (pip install matplotlib)", file=sys.stderr)


if __name__ == "__main__":
    run(main)

"""Plans capacity: what a deployment's devices hold, or what a KV cache of some size finds again.

Run:    python scripts/plan.py --config=kimi_k2_5_h100x8
        python scripts/plan.py --config=kimi_k2_5_v5p_8 --topology=v5p:2x2x4 --contexts=32768,131072 --json
        python scripts/plan.py --config=llama4_scout_h200x2 --compiled      # temporaries from the compiler
        python scripts/plan.py --trace=conversation_trace.jsonl --policy=value --plot=hit_rate.png
Expect: with --config a line of memory and a line a context (requests that fit, tokens a second that bandwidth and
arithmetic allow); with --trace a line a size with the share of prompt tokens found in the cache, for the policy, for
LRU and for infinite memory. --json prints an object, or one a line.
"""

import json
import os
import sys

from absl import flags

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # real devices here play no part
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

from trillion_infer.cache.eviction import POLICIES
from trillion_infer.cli.flags import run
from trillion_infer.config.deployment import find_deployment
from trillion_infer.core.errors import ConfigError
from trillion_infer.plan.trace import Replay, compare, gap_closed, load_trace, plot

CONFIG = flags.DEFINE_string("config", None, "Name of a deployment in configs/, or a path to such a file.")
TOPOLOGY = flags.DEFINE_string("topology", None, "Devices, e.g. v5p:2x2x2 or h100:8; default: the deployment's own.")
CONTEXTS = flags.DEFINE_list("contexts", [], "Lengths of requests to tell about; default: 4096 and up by 8.")
TEMP = flags.DEFINE_float("temp_gib", None, "Temporaries of a device's hungriest program; default: not counted.", 0.0)
COMPILED = flags.DEFINE_bool("compiled", False, "Compile the hungriest program for its temporaries (minutes).")
TRACE = flags.DEFINE_string("trace", None, "JSONL file of requests with input_length and hash_ids.")
POLICY = flags.DEFINE_enum("policy", next(iter(POLICIES)), list(POLICIES), "Eviction policy to compare with lru.")
SIZES = flags.DEFINE_list("sizes", ["1000", "3000", "10000", "30000", "100000"], "Pool sizes in blocks.")
PLOT = flags.DEFINE_string("plot", None, "Image to write; needs matplotlib.")
JSON = flags.DEFINE_bool("json", False, "Print JSON.")


def main(_: list[str]) -> None:
    if CONFIG.value is not None and TRACE.value is None:
        show_capacity(CONFIG.value)
    elif TRACE.value is not None and CONFIG.value is None:
        show_trace(TRACE.value)
    else:
        raise ConfigError("give exactly one of --config and --trace.")


def show_capacity(config: str) -> None:
    from trillion_infer.plan.capacity import plan_capacity

    plan = plan_capacity(
        find_deployment(config), TOPOLOGY.value, numbers(CONTEXTS), temp_gib=TEMP.value, compiled=COMPILED.value
    )
    if JSON.value:
        print(json.dumps(plan.as_json()))
        return
    at_most = "at most " if plan.temporaries == "not counted" else ""
    print(
        f"{plan.config} on {plan.devices} x {plan.device_kind} ({plan.topology}): a device has "
        f"{plan.memory_gib_per_device:.2f} GiB, {plan.weights_gib_per_device:.2f} of weights, "
        f"{plan.temp_gib_per_device:.2f} of temporaries ({plan.temporaries}), {plan.reserved_gib_per_device:.2f} "
        f"reserved; {at_most}{plan.kv_gib_total:.2f} GiB are left for KV in all, {plan.kv_tokens:,} tokens of "
        f"{plan.kv_bytes_per_token:,} bytes. Prefill: {plan.prefill_tok_s:,.0f} tokens/s at the very best."
    )
    print(f"{'context':>10}{'requests':>10}{'running':>10}{'GiB each':>10}{'tokens/s':>12}  bound by")
    for each in plan.contexts:
        print(
            f"{each.context:>10}{each.requests:>10}{each.running:>10}{each.kv_gib:>10.3f}{each.decode_tok_s:>12,.0f}"
            f"  {each.bound}"
        )


def show_trace(path: str) -> None:
    sizes = numbers(SIZES)
    *runs, infinite = compare(load_trace(path), list({POLICY.value: 0, "lru": 0}), sizes, show_replay)
    if not JSON.value:
        print(f"{'blocks':>8} {POLICY.value:>8} {'lru':>8} {'infinite':>8} {'gap closed':>10}")
        for size in sizes:
            mine, lru = (next(r for r in runs if (r.num_blocks, r.policy) == (size, p)) for p in (POLICY.value, "lru"))
            closed = gap_closed(mine, lru, infinite)
            rates = f"{mine.hit_rate:8.4f} {lru.hit_rate:8.4f} {infinite.hit_rate:8.4f}"
            print(f"{size:8d} {rates} {closed:10.1%}")
    if PLOT.value and not plot([*runs, infinite], PLOT.value):
        print("plan.py: no plot, matplotlib is not installed (pip install matplotlib)", file=sys.stderr)


def show_replay(replay: Replay) -> None:
    if JSON.value:
        names = {"blocks": replay.num_blocks, "hit_rate": replay.hit_rate, "evictions": replay.evictions}
        print(json.dumps({"policy": replay.policy, **names}), flush=True)


def numbers(flag: flags.FlagHolder) -> list[int]:
    try:
        return [int(each) for each in flag.value]
    except ValueError:
        raise ConfigError(f"--{flag.name}={','.join(flag.value)} must be whole numbers, joined by commas.") from None


if __name__ == "__main__":
    run(main)

"""Measures speed, start-up and memory, with the machine's limits and transformers (torch, CPU) in the same run.

Run:    python scripts/benchmark.py --model=MODEL --config=smollm2_cpu
        python scripts/benchmark.py --model=MODEL --workload=decode,prefill --json
        python scripts/benchmark.py --model=MODEL --torch_python=/path/to/python-with-torch
Expect: a table; with --json one object a line: engine, metric, value, unit, dtype, model (see docs/measurements.md).

decode: batch 1, 32 in, 128 out. prefill: 1,024 in, 1 out. offline: 32 requests of 16 to 512 in, 64 out, 16 running.
speculate: tool calls, JSON edits and chat with --speculate (ngram,suffix where not given) against none, batch 1 and 32;
    prompts in trillion_infer/benchmark/data; not among "all". Ratios above 1 say that drafts are faster.
startup: process start to first token, with an empty cache of compiled programs (startup_cold_s) and with a filled one.
serve: the offline requests over HTTP, all at once, streamed from a server process.
interference (not in all): 4 streams of 460 tokens while 2 prompts of 2,000 tokens come one by one; one server
without and with chunked prefill on all cores, against a prefill and a decode worker on half of the cores each.
transfer (alone): prompts of 2,000 tokens prefilled on one device and decoded on another of one process: the share of
prefill time that their KV is waited for, and its rate against a plain copy; --trace writes the timeline.
kv: time to first token of 2,000 tokens found in each tier and 50 new ones, in percent of computing all of them, and
what copying KV out costs decode; not part of all. Mooncake is measured where its package is installed.
Every run has prompts of its own, so prefix caching does not help; the best of --repeats is given.
"""

import sys
from typing import Any

from absl import flags
from rich.console import Console

from trillion_infer.benchmark.run import MAX_RUNNING, Plan, run_plan
from trillion_infer.benchmark.table import table
from trillion_infer.benchmark.workloads import Sizes, parse_workloads
from trillion_infer.cli.flags import define_llm_flags, run
from trillion_infer.cli.hosts import define_host_flags
from trillion_infer.cli.progress import progress_bars
from trillion_infer.cli.timeline import write_timeline

WORKLOAD = flags.DEFINE_string(
    "workload",
    "all",
    "decode, prefill, offline, startup, serve, interference, transfer, host, kv, speculate, several with commas, or "
    "all (without the last five).",
)
JSON = flags.DEFINE_bool("json", False, "One JSON object a line instead of a table.")
REPEATS = flags.DEFINE_integer("repeats", 3, "Runs of each workload; the best is given.")
SCALE = flags.DEFINE_float("scale", 1.0, "Factor on every size of the workloads; only 1 compares with other figures.")
TORCH_PYTHON = flags.DEFINE_string(
    "torch_python", None, 'Python with torch and transformers; default: this one if it has them. "" skips them.'
)
TRACE = flags.DEFINE_string("trace", None, "File for the timeline of the workload transfer: .json, .png or .svg.")
PLOT = flags.DEFINE_string("plot", None, "File for a picture of the workload interference: .png or .svg.")
llm_flags = define_llm_flags(max_running=MAX_RUNNING)
join_hosts = define_host_flags()


def main(_: list[str]) -> None:
    workloads = parse_workloads(WORKLOAD.value)

    def keep(events: list[dict[str, Any]]) -> None:
        assert TRACE.value is not None
        write_timeline(events, TRACE.value)

    sizes = Sizes().scaled(SCALE.value)
    trace = keep if TRACE.value else None
    plan = Plan(llm_flags(), workloads, sizes, REPEATS.value, TORCH_PYTHON.value, trace=trace, plot=PLOT.value)
    join_hosts()
    found = []
    with progress_bars() as progress:
        for record in run_plan(plan, lambda notice: print(f"notice: {notice}", file=sys.stderr), progress):
            found.append(record)
            if JSON.value:
                print(record.line(), flush=True)
    if found and not JSON.value:
        Console().print(table(found))


if __name__ == "__main__":
    run(main)

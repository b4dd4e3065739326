"""Compile every program of a deployment for devices that are not here, and say what memory is left for KV.

Run:    python scripts/compile.py --config=qwen3_30b_a3b_v5e_8
        python scripts/compile.py --config=kimi_k2_5_v5p_8 --topology=v5p:2x2x4 --json
        python scripts/compile.py --config=qwen3_30b_a3b_v5e_8 --bundle=bundles
        python scripts/compile.py --config=kimi_k2_5_h100x8 --largest
Expect: a table of programs (seconds, temporaries, FLOP, bytes moved) and a line of memory; --json prints one object.
Of a deployment with prefill and decode apart: one each, for the devices of each.
"""

import json
import os
import sys
import time
from dataclasses import replace

from absl import app, flags

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # real devices here play no part
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

from trillion_infer.cli.flags import run
from trillion_infer.config.deployment import find_deployment
from trillion_infer.core.errors import TrillionInferError
from trillion_infer.plan.compile_report import CompileReport, compile_deployment
from trillion_infer.plan.placement import roles_of
from trillion_infer.weights.rounding import RECIPES

CONFIG = flags.DEFINE_string(
    "config", None, "Name of a deployment in configs/, or a path to such a file.", required=True
)
TOPOLOGY = flags.DEFINE_string("topology", None, "Devices, e.g. v5p:2x2x2 or h100:8; default: the deployment's own.")
MESH = flags.DEFINE_string(
    "mesh",
    None,
    "Mesh in place of the deployment's, e.g. expert=16; default: its own, grown to the topology's devices.",
)
LARGEST = flags.DEFINE_bool(
    "largest", False, "Compile the largest step and its sampler only: the memory figures in a fraction of the time."
)
SPECULATE = flags.DEFINE_string(
    "speculate", None, "Drafters beside the model, as LLM takes them; of a path the config.json is enough."
)
BUNDLE = flags.DEFINE_string(
    "bundle", None, "Folder to write an executable bundle to: LLM(bundle=…) loads it on such devices without compiling."
)
QUANTIZE = flags.DEFINE_enum("quantize", None, list(RECIPES), "Round the weights of products to this format.")
JSON = flags.DEFINE_bool("json", False, "Print one JSON object.")


def show(report: CompileReport) -> None:
    row = report.as_json()
    if report.role:
        print(f"{report.role}, on devices {', '.join(map(str, report.device_ids))}:")
    print(f"{'program':<18}{'compile s':>10}{'temp GiB':>10}{'GFLOP':>12}{'GB moved':>10}")
    for program in row["programs"]:
        print(
            f"{program['name']:<18}{program['compile_s']:>10.1f}{program['temp_gib']:>10.3f}"
            f"{program['flops'] / 1e9:>12.1f}{program['bytes'] / 1e9:>10.2f}"
        )
    print(
        f"{row['config']} on {row['devices']} x {row['device_kind']} ({row['topology']}): a device has "
        f"{row['weights_gib_per_device']:.2f} GiB of weights, {row['temp_gib_per_device']:.2f} of temporaries, "
        f"{row['reserved_gib_per_device']:.2f} reserved; {row['kv_gib_total']:.2f} GiB are left for KV in all, "
        f"{row['kv_tokens']:,} tokens (weights held once, no temporaries: {report.kv_limit / 2**30:.2f} GiB)"
    )
    for each in row["drafters"]:
        print(
            f"of that the drafter {each['name']}: {each['weights_gib_per_device']:.3f} GiB of weights a device, "
            f"{100 * each['kv_share']:.1f} % of the KV"
        )
    if report.bundle_bytes:
        print(f"bundle: {len(report.programs)} programs, {report.bundle_bytes / 1e6:.1f} MB in {BUNDLE.value}")


class Progress:
    """A line on standard error as each program begins, with the seconds since the start."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def __call__(self, name: str, done: int, total: int) -> None:
        seconds = time.monotonic() - self._start
        print(f"compile.py: {done}/{total} {name} ({seconds:.0f} s)", file=sys.stderr, flush=True)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"Arguments {argv[1:]} are not flags.")
    try:
        deployment = find_deployment(CONFIG.value)
        if QUANTIZE.value:
            deployment = replace(deployment, options={**deployment.options, "quantize": QUANTIZE.value})
        if SPECULATE.value:
            deployment = replace(deployment, options={**deployment.options, "speculate": SPECULATE.value})
        options = (TOPOLOGY.value, MESH.value, Progress(), LARGEST.value, BUNDLE.value)
        for role in roles_of(deployment):
            tell_report(compile_deployment(deployment, *options, role))
    except TrillionInferError as error:
        sys.exit(f"compile.py: {error}")


def tell_report(report: CompileReport) -> None:
    for note in report.notes:
        print(f"compile.py: note: {note}", file=sys.stderr)
    if JSON.value:
        print(json.dumps(report.as_json()), flush=True)
    else:
        show(report)


if __name__ == "__main__":
    run(main)

"""The page of deployments: what compile reports say, beside the physical limit."""

from collections.abc import Mapping, Sequence
from typing import Any

from trillion_infer.config.deployment import find_deployment
from trillion_infer.engine.fits import total_weight_bytes
from trillion_infer.plan.placement import kv_limit, plan_deployment

GIB = 2**30

INTRODUCTION = """# Deployments and their memory

Written by `scripts/deployment_report.py` from what `python scripts/compile.py --config=NAME --json` printed: every
program of the deployment, compiled with the devices' own compiler on a machine that has none of them. Each file in
`configs/` states a model with its real numbers, a mesh, `max_running` and the longest context. Rows of two programs
are of `--largest`, which compiles the largest step and its sampler only: the same figures of memory in a fraction of
the time.
"""

CONCLUSION = """
The limit is the devices' memory less the reserve (1 GiB a GPU, 0.5 GiB a TPU device) and the weights held once: no
layout could leave more for KV. What remains between it and what is left are the temporaries of the hungriest program
on every device, named in the table, and what is held more than once: norms, biases and the padding of layouts. No
program copies a pool. Compile seconds are the sum over programs on two shared cores.

Kimi K2.5 on TPU7x and H100 has temporaries below 2% of the KV they stand beside, and so has Llama-3-8B (`pytest -m
slow --aot=all tests/plan/test_no_copies.py`). On TPU7x 1.06 GiB more were in every step, decode included, until
layers were read through views in tiles of eight rows: its compiler tiled all stacks of dense bfloat16 weights anew,
by 16 rows, before every loop over layers. Kimi K2.5's step of 128 rows took 1.14 GiB there and takes 0.05.

With prefill and decode on disjoint halves, a report for each role (`--largest`; the hungriest step of each and its
sampler):

| config | role, devices | temporaries a device | left for KV | tokens |
|---|---|---|---|---|
| `kimi_k2_5_apart_h100x16` | prefill, 0 to 7 | 0.57 GiB | 66.5 GiB | 1,016,576 |
| | decode, 8 to 15 | 0.57 | 66.5 | 1,016,576 |
| `kimi_k2_5_apart_tpu7x_8` | prefill, 0 to 7 | 2.09 | 183.4 | 2,522,496 |
| | decode, 8 to 15: its step of 128 rows | 1.20 | | |

Another number of devices is asked for with `--topology` (the deployment's widest axis then takes all of them) or
`--mesh`. A mesh that cannot hold the weights is refused before anything is compiled, with the least number of devices
of each kind that can; a split that leaves padding is named, with the numbers that divide.

The operations and bytes of a step are those of the weights it uses on one device, with even routing: compilers count
the body of the loop over layers once, and a kernel not at all. Attention over earlier tokens is not in them.
"""

HEADER = (
    "config",
    "devices",
    "weights a device, GiB",
    "if held once",
    "temporaries a device",
    "of program",
    "left for KV, GiB",
    "tokens",
    "limit, GiB",
    "of it",
    "programs",
    "compile s",
)


def row_of(report: Mapping[str, Any]) -> dict[str, Any]:
    """What the page keeps of an object that `compile.py --json` printed. Sizes in GiB."""
    blueprint, kind, _ = plan_deployment(find_deployment(report["config"]), report["topology"])
    once = total_weight_bytes(blueprint)
    hungriest = max(report["programs"], key=lambda program: program["temp_gib"])
    return {
        "config": report["config"],
        "devices": f"{report['devices']} {kind.name}",
        "weights_gib": report["weights_gib_per_device"],
        "once_gib": round(once / report["devices"] / GIB, 3),
        "temp_gib": report["temp_gib_per_device"],
        "hungriest": hungriest["name"],
        "kv_gib": report["kv_gib_total"],
        "kv_tokens": report["kv_tokens"],
        "limit_gib": round(kv_limit(blueprint, kind) / GIB, 3),
        "programs": len(report["programs"]),
        "compile_s": round(sum(program["compile_s"] for program in report["programs"])),
    }


def document(rows: Sequence[Mapping[str, Any]]) -> str:
    """The page, a row a deployment."""
    lines = ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    for row in rows:
        cells = (
            f"`{row['config']}`",
            row["devices"],
            f"{row['weights_gib']:.2f}",
            f"{row['once_gib']:.2f}",
            f"{row['temp_gib']:.3f}",
            row["hungriest"],
            f"{row['kv_gib']:.1f}",
            f"{row['kv_tokens']:,}",
            f"{row['limit_gib']:.1f}",
            f"{100 * row['kv_gib'] / row['limit_gib']:.1f}%",
            str(row["programs"]),
            str(row["compile_s"]),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([INTRODUCTION, *lines, CONCLUSION])

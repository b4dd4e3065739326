"""Compiles the kernels for devices that are not here and writes what they cost to docs/kernels.md.

Run:    JAX_PLATFORMS=cpu python scripts/kernel_report.py --targets=v5e:2x2,h100:8
        JAX_PLATFORMS=cpu python scripts/kernel_report.py --targets=tpu7x:2x2x1 --specs=llama-3-8b,gpt-oss-20b
Expect: a line a kernel as it compiles, seconds each; docs/kernels.json (all rows so far) and docs/kernels.md.

Rows of other targets and shapes are kept, so that the table can be made in parts.
"""

import importlib
import json
from dataclasses import asdict
from pathlib import Path

from absl import app, flags

from pallas_kernels.common.report import Cost, Row, table

TARGETS = flags.DEFINE_list("targets", ["v5e:2x2"], "Topologies, as sharding.topologies.topology takes them.")
OPS = flags.DEFINE_list("ops", ["ragged_paged_attention"], "Folders of pallas_kernels that have a report.py.")
SPECS = flags.DEFINE_list("specs", None, "Names of shapes; all if not given.")
OUTPUT = flags.DEFINE_string("output", "docs/kernels", "Path of the files, without .json and .md.")

INTRODUCTION = """# Kernels

Written by `scripts/kernel_report.py` with the real compilers, without the devices. Compile time is of a scan
over the layers of one model, on whatever machine ran the script; scratch is the vector memory (TPU) or shared
memory (GPU) that the kernel plans with; temp / pool is the compiler's temporaries over the pool, which is
updated in place and takes a quarter of the device. Bytes and GFLOP are of one call by the kernel's own loops
(decode: 64 sequences; prefill: a chunk of 512 tokens; each after up to 8192 cached tokens), beside the fewest
that the result needs.
"""


def main(_: list[str]) -> None:
    data, document = Path(f"{OUTPUT.value}.json"), Path(f"{OUTPUT.value}.md")
    known = [] if not data.exists() else [_row(entry) for entry in json.loads(data.read_text())]
    rows = {row.key: row for row in known}
    for op in OPS.value:
        report = importlib.import_module(f"pallas_kernels.{op}.report")
        unknown = set(SPECS.value or ()) - set(report.specs())
        if unknown:
            raise app.UsageError(f"{op} has no shape {sorted(unknown)}; its shapes are {', '.join(report.specs())}.")
        for target in TARGETS.value:
            for spec in SPECS.value or report.specs():
                for row in report.rows(target, spec):
                    print(f"{op} {spec} {row.batch} {target}: compiled in {row.compile_seconds} s", flush=True)
                    rows[row.key] = row
                _write(data, document, rows)


def _row(entry: dict) -> Row:
    return Row(**{**entry, "cost": Cost(**entry["cost"]), "fewest": Cost(**entry["fewest"])})


def _write(data: Path, document: Path, rows: dict[tuple, Row]) -> None:
    data.parent.mkdir(parents=True, exist_ok=True)
    ordered = [rows[key] for key in sorted(rows)]
    data.write_text("[\n" + ",\n".join(json.dumps(asdict(row)) for row in ordered) + "\n]\n")
    sections = [f"## {op}\n\n{table(r for r in ordered if r.op == op)}" for op in sorted({r.op for r in ordered})]
    document.write_text("\n".join([INTRODUCTION, *sections]))


if __name__ == "__main__":
    app.run(main)

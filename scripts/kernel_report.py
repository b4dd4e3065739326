"""Compiles the kernels for devices that are not here and writes what they cost to docs/kernels.md.

Run:    JAX_PLATFORMS=cpu python scripts/kernel_report.py --targets=v5e:2x2,h100:8
        JAX_PLATFORMS=cpu python scripts/kernel_report.py --targets=tpu7x:2x2x1 --specs=llama-3-8b,gpt-oss-20b
        JAX_PLATFORMS=cpu python scripts/kernel_report.py --ops=all --targets=all --missing
        JAX_PLATFORMS=cpu pytest -m aot --aot=all tests/kernels --rows=build/rows && \
            python scripts/kernel_report.py --targets= --merge=build/rows
Expect: a line a kernel as it compiles, CPU seconds each; docs/kernels.json (all rows so far) and docs/kernels.md.
        What does not compile is named, at the end once more, and makes the exit status 1.

Rows of other targets and shapes are kept, so that the table can be made in parts. With --missing rows of the same
code and shape are not made again. The compile tests leave their rows in a folder, so that nothing is compiled twice.
"""

import importlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from absl import app, flags

from pallas_kernels.common.kernel_report import KernelReport, backend_of
from pallas_kernels.common.report import Row, table
from pallas_kernels.common.sources import code_digest
from sharding.topologies import EVERY_KIND, KINDS, topology

ALL_OPS = ("ragged_paged_attention", "latent_paged_attention", "grouped_matmul", "quantised_matmul")

TARGETS = flags.DEFINE_list("targets", ["v5e:2x2"], "Topologies, as sharding.topologies.topology takes them, or all.")
OPS = flags.DEFINE_list("ops", ["ragged_paged_attention"], "Folders of pallas_kernels that have a report.py, or all.")
SPECS = flags.DEFINE_list("specs", None, "Names of shapes; all if not given.")
OUTPUT = flags.DEFINE_string("output", "docs/kernels", "Path of the files, without .json and .md.")
MISSING = flags.DEFINE_bool("missing", False, "Leave out rows that are there and were made of the same code.")
MERGE = flags.DEFINE_list(
    "merge",
    [],
    "Other files of rows, or folders of them; each replaces rows of the same kernels, unless of unknown code.",
)

INTRODUCTION = """# Kernels

Written by `scripts/kernel_report.py` with the real compilers, without the devices. Compile time is CPU seconds of
tracing, lowering and compiling a scan over the layers of one model (of products: one call), on whatever machine ran
the script; rows without it are of earlier code. Scratch is the vector memory (TPU) or shared memory (GPU) that the
kernel plans with; temp / pool is the compiler's temporaries over the pool, which is updated in place and takes a
quarter of the device (latents: 8 GiB). Bytes and GFLOP are of one call by the kernel's own loops (decode: 64
sequences; prefill: a chunk of 512 tokens; each after up to 8192 cached tokens), beside the fewest that the result
needs. The programs are those of the compile tests (`make test-aot`); one that copied its pool would have no row.
Prefill by Mosaic GPU is a second kernel for the shapes that it takes; `tuning/gpu.json` says where it runs.
"""


def main(_: list[str]) -> None:
    _check_flags()
    data, document = Path(f"{OUTPUT.value}.json"), Path(f"{OUTPUT.value}.md")
    others = [
        path for given in map(Path, MERGE.value) for path in (given.glob("*.json") if given.is_dir() else [given])
    ]
    files = [*([data] if data.exists() else []), *others]
    rows: dict[tuple, Row] = {}
    for path in files:
        read = [Row.of(entry) for entry in json.loads(path.read_text())]
        rows |= {row.key: row for row in read if row.code or row.key not in rows}
    _write(data, document, rows)
    failed = []
    for op, spec, batch, target in _wanted(rows):
        try:
            row = _report(op).row(target, spec, batch)
        except (RuntimeError, ValueError) as error:
            failed.append(f"{op} {spec} {batch} {target} does not compile: {str(error).partition(chr(10))[0]}")
            print(failed[-1], flush=True)
        else:
            print(f"{op} {spec} {batch} {target}: compiled in {row.compile_seconds} s of CPU time", flush=True)
            rows[row.key] = row
            _write(data, document, rows)
    if failed:
        raise SystemExit("\n".join(failed))


def _check_flags() -> None:
    """Raises UsageError for what is not there, before anything is compiled."""
    if unknown := set(OPS.value) - {*ALL_OPS, "all"}:
        known = ", ".join(ALL_OPS)
        raise app.UsageError(f"--ops: {', '.join(sorted(unknown))} is not known; use all, or of {known}.")
    if missing := [name for name in MERGE.value if not Path(name).exists()]:
        raise app.UsageError(f"--merge: there is no {', '.join(missing)}.")
    for target in [] if TARGETS.value == ["all"] else TARGETS.value:
        try:
            topology(target)
        except (RuntimeError, ValueError) as error:
            raise app.UsageError(f"--targets: {error}") from error


def _report(op: str) -> KernelReport:
    return importlib.import_module(f"pallas_kernels.{op}.report").REPORT


def _wanted(rows: dict[tuple, Row]) -> Iterator[tuple[str, str, str, str]]:
    """(op, spec, batch, target) of what is to be compiled."""
    for target in EVERY_KIND if TARGETS.value == ["all"] else TARGETS.value:
        kind, backend = KINDS[target.partition(":")[0]], backend_of(target)
        for op in ALL_OPS if OPS.value == ["all"] else OPS.value:
            specs = {spec.name: spec for spec in _report(op).shapes}
            if unknown := set(SPECS.value or ()) - set(specs):
                raise app.UsageError(f"{op} has no shape {sorted(unknown)}; its shapes are {', '.join(specs)}.")
            for name in SPECS.value or specs:
                code = code_digest(op, backend, specs[name])
                for batch in _report(op).batches(specs[name], backend):
                    found = rows.get((op, name, batch, kind.name))
                    if not (MISSING.value and found and found.code == code):
                        yield op, name, batch, target


def _write(data: Path, document: Path, rows: dict[tuple, Row]) -> None:
    data.parent.mkdir(parents=True, exist_ok=True)
    ordered = [rows[key] for key in sorted(rows)]
    data.write_text("[\n" + ",\n".join(json.dumps(asdict(row)) for row in ordered) + "\n]\n")
    sections = [f"## {op}\n\n{table(r for r in ordered if r.op == op)}" for op in sorted({r.op for r in ordered})]
    document.write_text("\n".join([INTRODUCTION, *sections]))


if __name__ == "__main__":
    app.run(main)

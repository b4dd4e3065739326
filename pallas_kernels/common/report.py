"""What a kernel costs beside the fewest possible: a row for each shape and target, and the table of them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax

HEADER = (
    "shape",
    "batch",
    "target",
    "compile CPU s",
    "scratch MiB",
    "temp / pool",
    "bytes MB",
    "of fewest",
    "GFLOP",
    "of fewest",
)


@dataclass(frozen=True)
class Cost:
    """Bytes between device memory and chip, and floating point operations."""

    bytes: int
    flops: int


@dataclass(frozen=True)
class Row:
    """One compiled kernel."""

    op: str
    spec: str
    batch: str
    target: str
    compile_seconds: float  # of CPU time, of all threads
    scratch_bytes: int  # of vector memory (TPU) or shared memory (GPU), as planned by the kernel
    temp_bytes: int  # temporaries in device memory, by the compiler
    pool_bytes: int  # of the array updated in place; 0 where there is none
    cost: Cost  # of one call
    fewest: Cost
    code: str = ""  # digest of the kernel's sources and the shape, by `sources.code_digest`

    @staticmethod
    def of(entry: dict[str, Any]) -> "Row":
        """What `dataclasses.asdict` made."""
        return Row(**{**entry, "cost": Cost(**entry["cost"]), "fewest": Cost(**entry["fewest"])})

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.op, self.spec, self.batch, self.target


def temporaries(compiled: jax.stages.Compiled) -> int:
    """Bytes of device memory that a compiled program needs beside its arguments and results, by its compiler."""
    analysis = compiled.memory_analysis()
    assert analysis is not None, "compilers for TPU and GPU say what memory a program takes"
    return analysis.temp_size_in_bytes


def table(rows: Iterable[Row]) -> str:
    """Markdown, a row a kernel in the order of their keys."""
    lines = ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    for row in sorted(rows, key=lambda row: row.key):
        temp = f"{100 * row.temp_bytes / row.pool_bytes:.2f}%" if row.pool_bytes else "-"
        cells = (
            row.spec,
            row.batch,
            row.target,
            f"{row.compile_seconds:.1f}" if row.code else "-",
            f"{row.scratch_bytes / 2**20:.2f}",
            temp,
            f"{row.cost.bytes / 1e6:.1f}",
            f"{row.cost.bytes / row.fewest.bytes:.2f}x",
            f"{row.cost.flops / 1e9:.2f}",
            f"{row.cost.flops / row.fewest.flops:.2f}x",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"

"""Records as a table to read."""

from collections.abc import Sequence

from rich.table import Table

from trillion_infer.benchmark.records import BASELINE, ENGINE, MACHINE, UNITS, Record


def table(records: Sequence[Record]) -> Table:
    """A line a metric: this engine, the baseline and their ratio; the machine's limits below."""
    values = {(r.engine, r.metric): f"{r.value:,g}" for r in records}
    engines = [ENGINE, *([BASELINE, f"{ENGINE}/{BASELINE}"] if any(r.engine == BASELINE for r in records) else [])]
    first = next((r for r in records if r.engine == ENGINE), None)
    shown = Table(title=f"{first.model}, {first.dtype}" if first else None)
    for name in ("metric", "unit", *engines):
        shown.add_column(
            name.replace(f"{ENGINE}/{BASELINE}", "ratio"), justify="left" if name in ("metric", "unit") else "right"
        )
    measured = {metric for _, metric in values}
    limits = {metric for engine, metric in values if engine == MACHINE}
    for metric in (m for m in UNITS if m in measured - limits):
        shown.add_row(metric, UNITS[metric], *(values.get((engine, metric), "") for engine in engines))
    shown.add_section()
    for metric in (m for m in UNITS if m in limits):
        shown.add_row(f"machine {metric}", UNITS[metric], values[MACHINE, metric])
    return shown

"""Records as a section of a Markdown file, and as a chart."""

import os
import platform
from collections.abc import Sequence
from pathlib import Path

import jax

from trillion_infer.benchmark.records import ENGINE, MACHINE, UNITS, Record
from trillion_infer.core.errors import ConfigError

BEGIN, END = "<!-- benchmarks: written by benchmarks/compare.py -->", "<!-- benchmarks: end -->"
_LESS_IS_BETTER = ("startup_s", "startup_cold_s", "peak_rss_mb")


def engines_of(records: Sequence[Record]) -> list[str]:
    """This engine first, then the others as they came; neither machine nor ratios."""
    names = dict.fromkeys(r.engine for r in records if r.engine != MACHINE and "/" not in r.engine)
    return sorted(names, key=lambda name: name != ENGINE)


def markdown(records: Sequence[Record], absent: Sequence[str]) -> str:
    """A table of figures with ratios to every other engine, the machine's limits, and who was absent and why."""
    engines = engines_of(records)
    values = {(r.engine, r.metric): r.value for r in records}
    first = next(r for r in records if r.engine == ENGINE)
    head = ["metric", "unit", *engines, *(f"/ {name}" for name in engines[1:])]
    lines = [
        f"### {first.model}, {first.dtype}, one run",
        "",
        f"{_machine()}; jax {jax.__version__}.",
        "",
        f"| {' | '.join(head)} |",
        f"|---|---|{'---:|' * (len(head) - 2)}",
    ]
    for metric in (m for m in UNITS if any((name, m) in values for name in engines)):
        ours = values.get((ENGINE, metric))
        cells = [f"{values[name, metric]:,g}" if (name, metric) in values else "" for name in engines]
        for name in engines[1:]:
            theirs = values.get((name, metric))
            cells.append(f"{ours / theirs:.2f}" if ours and theirs else "")
        lines.append(f"| {metric} | {UNITS[metric]} | {' | '.join(cells)} |")
    for metric in (m for m in UNITS if (MACHINE, m) in values):
        rest = " |" * (len(head) - 3)
        lines.append(f"| machine {metric} | {UNITS[metric]} | {values[MACHINE, metric]:,g} |{rest}")
    lines += ["", *(f"- {reason}" for reason in absent)]
    return "\n".join(lines).rstrip() + "\n"


def write_section(path: Path, section: str) -> None:
    """Puts the section between the marks of the file, or at its end with marks around it.

    Raises ConfigError for a file with one mark only, OSError.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if (BEGIN in text) != (END in text):
        raise ConfigError(f"{path} has one of the marks {BEGIN!r} and {END!r} but not the other; mend it.")
    marked = f"{BEGIN}\n{section}{END}"
    if BEGIN in text:
        before, _, rest = text.partition(BEGIN)
        text = before + marked + rest.partition(END)[2]
    else:
        text = f"{text.rstrip()}\n\n{marked}\n" if text else f"{marked}\n"
    path.write_text(text, encoding="utf-8")


def draw_chart(path: Path, records: Sequence[Record]) -> None:
    """A bar an engine for every metric that two engines have, this engine's as 1; longer is better.

    Raises ConfigError where matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a chart needs matplotlib; pip install trillion-infer[notebook]") from error
    engines = engines_of(records)
    values = {(r.engine, r.metric): r.value for r in records}
    shared = [m for m in UNITS if (ENGINE, m) in values and any((name, m) in values for name in engines[1:])]
    figure = Figure(figsize=(8, 1.2 + 0.9 * max(1, len(shared))), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(engines)
    for place, name in enumerate(engines):
        found = [(row, m) for row, m in enumerate(shared) if (name, m) in values]
        lengths = [_relative(values[name, m], values[ENGINE, m], m) for _, m in found]
        bars = axes.barh([row + place * height for row, _ in found], lengths, height, label=name)
        axes.bar_label(bars, [f"{values[name, m]:,g} {UNITS[m]}" for _, m in found], padding=3, fontsize=8)
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(shared))], shared)
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_xlabel(f"relative to {ENGINE}; longer is better")
    axes.legend()
    figure.savefig(path, dpi=150)


def _relative(value: float, ours: float, metric: str) -> float:
    return ours / value if metric in _LESS_IS_BETTER else value / ours


def _machine() -> str:
    kind = jax.devices()[0].device_kind
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {len(jax.devices())} x {kind}"

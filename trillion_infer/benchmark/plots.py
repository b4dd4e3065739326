"""Pictures of what a workload measured."""

from collections.abc import Mapping

from trillion_infer.core.errors import ConfigError

_BARS = {"token_p50_ms": "median", "token_p90_ms": "90 %", "token_max_ms": "longest"}


def draw_interference(found: Mapping[str, Mapping[str, float]], path: str) -> None:
    """Time between tokens of streams by setup, on a logarithmic scale, with the total throughput of each.

    Raises ConfigError without matplotlib and for a file that is no .png or .svg.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ConfigError("a picture needs matplotlib; pip install 'trillion-infer[notebook]'.") from None
    if not path.endswith((".png", ".svg")):
        raise ConfigError(f"--plot={path} must end in .png or .svg.")
    figure = Figure(figsize=(7.5, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for place, (metric, label) in enumerate(_BARS.items()):
        at = [i + 0.27 * (place - 1) for i in range(len(found))]
        bars = axes.bar(at, [figures[metric] for figures in found.values()], 0.25, label=label)
        axes.bar_label(bars, fmt="%.0f", fontsize=8)
    names = [f"{setup}\n{figures['total_tok_s']:.0f} tokens/s in all" for setup, figures in found.items()]
    axes.set_xticks(range(len(found)), names)
    axes.set_yscale("log")
    axes.set_ylabel("ms between tokens while\na prompt is computed")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)

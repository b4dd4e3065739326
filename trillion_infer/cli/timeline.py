"""Timelines of several workers as one Chrome trace or one picture."""

import json
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.error import URLError

from trillion_infer.core.errors import ConfigError

COLOURS = {
    "queue": "#bbbbbb",
    "prefill": "#d95f02",
    "transfer": "#7570b3",
    "waiting for prefill": "#cccccc",
    "decode": "#1b9e77",
}


def fetch_events(urls: Sequence[str], key: str) -> list[dict[str, Any]]:
    """The spans of all workers. Raises ConfigError for one that does not answer or refuses the key."""
    if not urls:
        raise ConfigError("--workers is empty; give the base URL of at least one worker.")
    events: list[dict[str, Any]] = []
    for url in urls:
        request = urllib.request.Request(f"{url}/admin/timeline", headers={"authorization": f"Bearer {key}"})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                events += json.load(answer)["traceEvents"]
        except (URLError, OSError, ValueError, KeyError) as error:
            raise ConfigError(f"{url} gave no timeline ({error}); start it with --role and --admin_key.") from error
    return events


def write_timeline(events: Sequence[dict[str, Any]], path: str) -> None:
    """A .json trace, or a picture by matplotlib. Raises ConfigError for other names."""
    if path.endswith(".json"):
        Path(path).write_text(json.dumps({"traceEvents": list(events)}), encoding="utf-8")
    elif path.endswith((".png", ".svg")):
        draw(events, path)
    else:
        raise ConfigError(f"--output={path} must end in .json, .png or .svg.")


def draw(events: Sequence[dict[str, Any]], path: str) -> None:
    """A row for each lane of each worker, time from left to right."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ConfigError("a picture needs matplotlib; pip install 'trillion-infer[notebook]'.") from None
    workers = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    spans = [event for event in events if event["ph"] == "X"]
    if not spans:
        raise ConfigError("the workers have no spans yet; send them requests first.")
    rows = sorted({(workers[e["pid"]], list(COLOURS).index(e["cat"]), e["cat"]) for e in spans})
    start = min(event["ts"] for event in spans)
    figure = Figure(figsize=(11, 0.6 + 0.42 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for place, (worker, _, lane) in enumerate(rows):
        bars = [
            ((e["ts"] - start) / 1e6, e["dur"] / 1e6) for e in spans if (workers[e["pid"]], e["cat"]) == (worker, lane)
        ]
        axes.broken_barh(
            bars, (place - 0.4, 0.8), facecolor=COLOURS[lane], edgecolor="white", linewidth=0.4, alpha=0.85
        )
    axes.set_yticks(range(len(rows)), [f"{worker}: {lane}" for worker, _, lane in rows])
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    figure.savefig(path, dpi=110)

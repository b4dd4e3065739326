"""Progress bars on a terminal, silence elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_UNITS = {"fetch": "bytes", "load": "bytes", "compile": "programs"}
_LABELS = {"fetch": "Downloading", "load": "Loading weights", "compile": "Compiling", "rows": "Answering"}


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """A function (phase, done, total) that draws one bar a phase on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:16}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    tasks: dict[str, TaskID] = {}
    bars = Progress(*columns, console=Console(file=sys.stderr))

    def tell(phase: str, done: int, total: int) -> None:
        amount = f"{done}/{total}" if _UNITS.get(phase) != "bytes" else f"{done / 1e6:.0f}/{total / 1e6:.0f} MB"
        if not tasks:
            bars.start()
        if phase not in tasks:
            tasks[phase] = bars.add_task(_LABELS.get(phase, phase), total=total, amount=amount)
        bars.update(tasks[phase], completed=done, total=total, amount=amount)

    try:
        yield tell
    finally:
        if tasks:
            bars.stop()

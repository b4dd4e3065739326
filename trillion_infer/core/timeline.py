"""What a start-up did when: phases on the threads that ran them, as bars and as a Chrome trace."""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

BAR = 40
"""Characters of the whole time."""


@dataclass(frozen=True)
class Phase:
    """Seconds since the timeline's origin."""

    name: str
    start: float
    end: float
    thread: str


class Timeline:
    """Phases of a start-up, from several threads. origin: a `time.perf_counter` value, time 0 of every figure."""

    def __init__(self, origin: float | None = None):
        self._origin = time.perf_counter() if origin is None else origin
        self._phases: list[Phase] = []

    @classmethod
    def of_process(cls) -> "Timeline":
        """From the start of this process, where the system tells; its first phase is everything until now."""
        now, age = time.perf_counter(), _process_age()
        timeline = cls(now - age)
        if age:
            timeline.add("start and imports", 0.0, age)
        return timeline

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times what is done inside."""
        start = time.perf_counter() - self._origin
        try:
            yield
        finally:
            self.add(name, start, time.perf_counter() - self._origin)

    def add(self, name: str, start: float, end: float) -> None:
        self._phases.append(Phase(name, start, end, threading.current_thread().name))

    @property
    def phases(self) -> list[Phase]:
        """In the order in which they began."""
        return sorted(self._phases, key=lambda phase: phase.start)

    def bars(self) -> str:
        """A line a phase: when it ran within the whole, and its seconds."""
        phases = self.phases
        whole = max((phase.end for phase in phases), default=0.0) or 1.0
        width = max((len(phase.name) for phase in phases), default=0)
        lines = []
        for phase in phases:
            first = min(int(phase.start / whole * BAR), BAR - 1)
            last = max(first + 1, round(phase.end / whole * BAR))
            bar = " " * first + "█" * (last - first)
            lines.append(f"{phase.name:<{width}} {bar:<{BAR}} {phase.end - phase.start:7.2f} s")
        return "\n".join(lines)

    def write_trace(self, path: str | Path) -> None:
        """Writes Chrome's trace format, for chrome://tracing and ui.perfetto.dev. Raises OSError."""
        threads = {name: number for number, name in enumerate(dict.fromkeys(phase.thread for phase in self.phases))}
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": name}}
            for name, number in threads.items()
        ]
        events += [
            {
                "ph": "X",
                "name": phase.name,
                "pid": 1,
                "tid": threads[phase.thread],
                "ts": round(phase.start * 1e6),
                "dur": round((phase.end - phase.start) * 1e6),
            }
            for phase in self.phases
        ]
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _process_age() -> float:
    """Seconds since this process began, 0 where the system does not tell (no /proc)."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        begun = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - begun)
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0

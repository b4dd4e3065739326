"""What happened when, as lanes of spans; read by chrome://tracing and Perfetto."""

import time
from collections import deque
from typing import Any

MAX_SPANS = 20_000


class Timeline:
    """The newest spans of one process. Times are of `time.monotonic()`; they leave as wall-clock microseconds, so
    that timelines of processes of one machine can be laid side by side."""

    def __init__(self, process: str):
        self.process = process
        self._spans: deque[tuple[str, str, float, float, dict[str, Any]]] = deque(maxlen=MAX_SPANS)
        self._to_wall = time.time() - time.monotonic()

    def add(self, lane: str, name: str, begin: float, end: float, **details: Any) -> None:
        self._spans.append((lane, name, begin, end, details))

    def events(self) -> list[dict[str, Any]]:
        """Complete events ("ph": "X") of the Chrome trace format, and the names of process and lanes."""
        lanes = list(dict.fromkeys(span[0] for span in self._spans))
        pid = abs(hash_name(self.process))
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": self.process}}
        ]
        for tid, lane in enumerate(lanes):
            events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": lane}})
        for lane, name, begin, end, details in self._spans:
            events.append(
                {
                    "ph": "X",
                    "pid": pid,
                    "tid": lanes.index(lane),
                    "name": name,
                    "cat": lane,
                    "ts": round((begin + self._to_wall) * 1e6),
                    "dur": max(1, round((end - begin) * 1e6)),
                    "args": details,
                }
            )
        return events


def hash_name(name: str) -> int:
    """A number for a name, the same in every process."""
    value = 0
    for byte in name.encode():
        value = (value * 131 + byte) % 1_000_003
    return value

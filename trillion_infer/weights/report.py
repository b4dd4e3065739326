"""What a load did."""

from collections.abc import Callable
from dataclasses import dataclass

Progress = Callable[[int, int], None]
"""progress(bytes_done, bytes_total)"""


@dataclass(frozen=True)
class LoadReport:
    """What a load read (bytes of the files, this process's part), and how it judged the other tensors.

    `missing` and `unexpected` are empty after a load: either is an error. `tied` heads are read from the embedding;
    `skipped` tensors are known and not used.
    """

    bytes: int
    seconds: float
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def gb_s(self) -> float:
        """Gigabytes (10^9) of checkpoint a second."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0

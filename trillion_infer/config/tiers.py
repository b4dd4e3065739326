"""Budgets of the KV tiers beyond device memory, as users write them."""

import math
from dataclasses import dataclass
from pathlib import Path

from trillion_infer.core.errors import ConfigError


@dataclass(frozen=True)
class DiskBudget:
    """A folder and the bytes it may take."""

    folder: Path
    num_bytes: int


def parse_disk(text: str) -> DiskBudget:
    """`FOLDER:BYTES`, such as /nvme/kv:100e9. Raises ConfigError."""
    folder, colon, size = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    try:
        number = float(size)
    except ValueError:
        number = math.nan
    if not colon or not folder or not math.isfinite(number) or number < 1:
        raise ConfigError(f"disk_kv is {text!r}; it must be FOLDER:BYTES, such as /nvme/kv:100e9.")
    return DiskBudget(Path(folder).expanduser(), int(number))


def check_host(num_bytes: object) -> None:
    """Raises ConfigError unless it is bytes, 0 for none."""
    valid = isinstance(num_bytes, int | float) and not isinstance(num_bytes, bool) and math.isfinite(num_bytes)
    if not valid or num_bytes < 0:  # pyright: ignore
        raise ConfigError(f"host_kv is {num_bytes!r}; it must be a number of bytes, 0 for none.")

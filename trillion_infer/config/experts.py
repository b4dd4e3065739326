"""Where the weights of routed experts lie, as users write it."""

import math
from dataclasses import dataclass

from trillion_infer.core.errors import ConfigError

PLACES = ("host", "disk")


@dataclass(frozen=True)
class ExpertMemory:
    """place: host (memory) or disk (a mapped file). device_bytes: for hot experts, of all devices together; 0 where the
    library chooses."""

    place: str
    device_bytes: float


def parse_expert_memory(text: str | None) -> ExpertMemory | None:
    """None where experts lie on the devices, from `host`, `disk`, or either with bytes (`host:600e6`).

    Raises ConfigError.
    """
    if text is None or text == "device":
        return None
    place, colon, size = text.partition(":")
    try:
        number = float(size) if colon else 0.0
    except ValueError:
        number = math.nan
    if place not in PLACES or not math.isfinite(number) or (colon and number < 1):
        raise ConfigError(
            f"expert_memory is {text!r}; it must be device, host, disk, or one of the last two with BYTES such as "
            "host:600e6."
        )
    return ExpertMemory(place, number)

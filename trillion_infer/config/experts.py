"""Where the weights of routed experts lie, as users write it."""

import math

from trillion_infer.core.errors import ConfigError


def parse_expert_memory(text: str | None) -> float | None:
    """None: experts lie on the devices. 0: in host memory ("host"), the cache sized by the library; else the bytes of
    device memory, of all devices together, for hot experts ("host:600e6"). Raises ConfigError."""
    if text is None or text == "device":
        return None
    place, colon, size = text.partition(":")
    try:
        number = float(size) if colon else 0.0
    except ValueError:
        number = math.nan
    if place != "host" or not math.isfinite(number) or (colon and number < 1):
        raise ConfigError(f"expert_memory is {text!r}; it must be device, host, or host:BYTES such as host:600e6.")
    return number

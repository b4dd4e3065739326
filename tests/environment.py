"""What processes that tests start are to know."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]


def environment(devices: int = 1, **variables: str) -> dict[str, str]:
    """That of these tests, how well they are compiled included (`conftest.py`), with `devices` virtual CPU devices."""
    flags = [each for each in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in each]
    flags.append(f"--xla_force_host_platform_device_count={devices}")
    return {**os.environ, "XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **variables}

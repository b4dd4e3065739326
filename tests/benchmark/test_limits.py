"""The machine's limits."""

import math

from trillion_infer.benchmark.limits import machine_limits


def test_limits_are_positive_numbers():
    limits = machine_limits(read_bytes=1 << 20, side=64)
    assert list(limits) == ["read_gb_s", "bf16_gflops", "f32_gflops"]
    assert all(value > 0 and math.isfinite(value) for value in limits.values()), limits

"""How tests of one op run the kernels of each backend on CPU."""

from collections.abc import Container, Iterable

import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.cpu_native import native

INTERPRET = {"tpu": pltpu.InterpretParams(detect_races=True), "gpu": True}
"""By backend; the others need none. A TPU's memories, copies and semaphores are modelled, and races found. Engines take
`True`, which carries copies out where they start: sixty times faster."""

NATIVE = pytest.mark.skipif(not native().isas, reason="no native kernels here")
BACKENDS = ("reference", pytest.param("cpu", marks=NATIVE), "tpu", "gpu")


def on_each_backend(names: Iterable[str], quick: Container[str]) -> list:
    """Parameters (name, backend) of each case on each backend; those that are interpreted are slow, but the `quick`."""
    cases = []
    for name in names:
        interpreted = () if name in quick else pytest.mark.slow
        cases += [pytest.param(name, "reference"), pytest.param(name, "cpu", marks=NATIVE)]
        cases += [pytest.param(name, backend, marks=interpreted) for backend in INTERPRET]
    return cases

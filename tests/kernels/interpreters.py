"""How tests of one op run the Pallas kernels of each backend on CPU."""

from jax.experimental.pallas import tpu as pltpu

INTERPRET = {"tpu": pltpu.InterpretParams(detect_races=True), "gpu": True}
"""By backend; the others need none. A TPU's memories, copies and semaphores are modelled, and races found. Engines take
`True`, which carries copies out where they start: sixty times faster."""

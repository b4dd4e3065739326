import contextlib

import jax

# Set before the first use of a device: the tests of sharding need eight of them.
with contextlib.suppress(RuntimeError):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)

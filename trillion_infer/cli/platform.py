"""Where there is no accelerator, JAX is told so: plugins installed for ahead-of-time compiles then stay silent."""

import glob
import os

ACCELERATORS = ("/dev/accel*", "/dev/vfio/[0-9]*", "/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg")
"""Device files of TPUs and GPUs."""


def settle_platform() -> None:
    """Chooses the CPU, unless JAX_PLATFORMS says otherwise or an accelerator's device file is there."""
    if os.environ.get("JAX_PLATFORMS") or any(glob.glob(pattern) for pattern in ACCELERATORS):
        return
    import jax

    jax.config.update("jax_platforms", "cpu")

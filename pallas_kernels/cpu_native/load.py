"""Loads the native library into the process and registers its custom calls with XLA."""

import ctypes
import functools
import logging
from dataclasses import dataclass

import jax

from pallas_kernels.cpu_native.build import library

_TARGETS = (
    "ti_matmul",
    "ti_ragged_attention",
    "ti_latent_attention",
    "ti_unwritten",
    "ti_will_need",
    "ti_read_pages",
    "ti_write_pages",
)
_ISAS = ("avx512", "avx2", "neon")


@dataclass(frozen=True)
class Native:
    """What this process can run natively: `isas` best first; empty with a `reason` when nothing."""

    isas: tuple[str, ...]
    reason: str = ""
    library: ctypes.CDLL | None = None


@functools.cache
def native() -> Native:
    """Builds, loads and registers the library at the first call; later calls return the same answer."""
    built = library()
    if built.path is None:
        logging.getLogger(__name__).warning("Native CPU kernels are off, XLA serves instead: %s.", built.reason)
        return Native((), built.reason)
    try:
        loaded = ctypes.CDLL(str(built.path))
    except OSError as error:
        return Native((), f"the native library does not load: {error}")
    isas = tuple(isa for isa in _ISAS if loaded.ti_serves(isa.encode()))
    if not isas:
        return Native((), "the native kernels need AVX2 or NEON, which this processor lacks")
    for target in _TARGETS:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(loaded, target)), platform="cpu")
    return Native(isas, library=loaded)


def require(isa: str) -> None:
    """Raises NotImplementedError with the reason unless custom calls can run here with `isa`.

    Args:
      isa: "auto" (the best that the processor has) or one of avx2, avx512, neon.
    """
    have = native()
    if not have.isas:
        raise NotImplementedError(f"native CPU kernels are not available: {have.reason}")
    if isa != "auto" and isa not in have.isas:
        raise NotImplementedError(f"isa={isa!r} cannot run here; this processor and build have auto, {have.isas}")


def prefer(isa: str) -> None:
    """Has `isa`, an instruction set or "auto", serve every call of this process that names none.

    Raises ValueError for what this processor and build do not have.
    """
    have = native()
    if have.library is None and isa == "auto":
        return
    if isa != "auto" and isa not in have.isas:
        choices = ", ".join(("auto", *have.isas))
        raise ValueError(f"{isa!r}, which cannot run here; this processor and build have {choices}")
    have.library.ti_prefer(isa.encode())  # pyright: ignore[reportOptionalMemberAccess]

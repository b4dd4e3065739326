"""Which implementation of an operation runs: the one asked for, or the first that can."""

from collections.abc import Callable, Mapping

import jax

PLATFORM_ORDER = {
    "tpu": ("tpu", "reference"),
    "gpu": ("gpu", "reference"),
    "cpu": ("cpu", "reference"),
}


class UnsupportedError(ValueError):
    """An implementation cannot run these arguments; the message says which and why."""


def target_platform() -> str:
    """`tpu`, `gpu` or `cpu`: the platform of the mesh in context, else of the default device."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    kind = (getattr(device, "device_kind", None) or "").lower()
    if kind.startswith("tpu"):
        return "tpu"
    if "nvidia" in kind:
        return "gpu"
    platform = jax.default_backend()
    return "gpu" if platform in ("cuda", "rocm") else platform


def choose_backend(op: str, backend: str, refusals: Mapping[str, Callable[[], str | None]]) -> str:
    """Name of the implementation to run.

    Args:
      op: name of the operation, for messages.
      backend: `auto`, or one name that `refusals` has.
      refusals: for each implementation a function that returns None where it can run these arguments, else a
        sentence that says why it cannot.

    Returns:
      `backend` itself, or for `auto` the first implementation of this platform that does not refuse.

    Raises:
      ValueError: `backend` is no known name.
      UnsupportedError: none can run; every reason is listed.
    """
    if backend != "auto" and backend not in refusals:
        allowed = ", ".join(["auto", *refusals])
        raise ValueError(f"{op}: backend={backend!r} is not known; use one of {allowed}.")
    order = PLATFORM_ORDER.get(target_platform(), ("reference",)) if backend == "auto" else (backend,)
    reasons = []
    for name in order:
        if name not in refusals:
            continue
        reason = refusals[name]()
        if reason is None:
            return name
        reasons.append(f"{name}: {reason}")
    raise UnsupportedError(f"{op}: no implementation can run these arguments. " + " ".join(reasons))

"""What must be equal for a compiled program to be used: the model's shape, the devices, the compilers and the code."""

import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.sharding import Mesh

from trillion_infer.engine.ops import platform_of

_COMPILERS = {
    "tpu": ("libtpu",),
    "gpu": ("jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin", "jax-cuda12-pjrt"),
}
"""Packages with a platform's compiler and runtime, beside jax and jaxlib."""

_JAX_OPTIONS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_threefry_partitionable", "jax_default_prng_impl")
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_ROOT = Path(__file__).parents[3]
_SOURCES = (
    "pallas_kernels",
    "sharding",
    *(
        f"trillion_infer/{part}"
        for part in ("config", "params", "engine", "layers", "models", "sample", "speculate", "cache")
    ),
)
"""Packages whose code shapes programs."""


def key(identity: Mapping[str, Any]) -> str:
    """Name of the folder of a bundle with this identity."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted names of what is not equal."""
    for name in sorted({*ours, *theirs}):
        a, b = ours.get(name), theirs.get(name)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from differences(a, b, f"{prefix}{name}.")
        elif a != b:
            yield prefix + name


def surroundings(mesh: Mesh) -> dict[str, Any]:
    """Devices, versions, flags and code, as JSON. The mesh's devices need not be here."""
    first = mesh.devices.flat[0]
    kind = platform_of(mesh)
    return {
        "mesh": {
            "axes": dict(mesh.shape),
            "device_kind": first.device_kind,
            "device_ids": [device.id for device in mesh.devices.flat],
            "processes": len({device.process_index for device in mesh.devices.flat}),
        },
        "platform": kind,
        "host": _host() if kind == "cpu" else None,
        "versions": {
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,  # pyright: ignore[reportPrivateImportUsage]
            **{name: _version(name) for name in _COMPILERS.get(kind, ())},
        },
        "flags": {
            **{name: os.environ.get(name, "") for name in _VARIABLES},
            **{name: _plain(getattr(jax.config, name, None)) for name in _JAX_OPTIONS},
        },
        "code": code_digest(),
    }


@cache
def code_digest() -> str:
    """Digest of every file of the packages that shape programs."""
    digest, root = hashlib.sha256(), len(str(_ROOT))
    for package in _SOURCES:
        found = [
            os.path.join(folder, name)  # some 250 paths: a pathlib.Path each would cost more than reading them
            for folder, _, names in os.walk(_ROOT / package)
            for name in names
            if name.endswith((".py", ".json", ".cc", ".h"))
        ]
        for path in sorted(found):
            with open(path, "rb", buffering=0) as file:
                code = file.read()
            digest.update(f"{path[root:]}\0{len(code)}\0".encode())
            digest.update(code)
    return digest.hexdigest()


def _host() -> dict[str, Any]:
    """The processor that code was generated for."""
    flags = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith(("flags", "Features", "model name"))]
        flags = "\n".join(dict.fromkeys(lines))
    return {"cpu": hashlib.sha256(f"{platform.machine()}\n{flags}".encode()).hexdigest()[:16], "cores": os.cpu_count()}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | str | None) else str(value)

"""Devices that are not here: descriptions that XLA compiles for, and what memory each kind has to use."""

import os
from dataclasses import dataclass
from math import prod

import jax
import numpy as np
from jax.experimental import topologies

GIB = 2**30

HOPPER = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: {memory} cuda_compute_capability {{ major: 9 minor: 0 }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{name}"
"""


@dataclass(frozen=True)
class DeviceKind:
    """Limits of one device. Memory in bytes; rates per second, vendors' figures for a whole device."""

    name: str
    platform: str
    memory: int  # usable: what the compiler enforces
    bandwidth: float
    bf16_flops: float
    scratch: int  # vector memory of a TPU core, shared memory of a GPU block


KINDS = {
    kind.name: kind
    for kind in (
        DeviceKind("v5e", "tpu", int(15.75 * GIB), 819e9, 197e12, 128 * 2**20),
        DeviceKind("v5p", "tpu", int(95.73 * GIB), 2765e9, 459e12, 64 * 2**20),
        DeviceKind("v6e", "tpu", int(31.24 * GIB), 1640e9, 918e12, 128 * 2**20),
        DeviceKind("tpu7x", "tpu", int(94.74 * GIB), 3690e9, 1153.5e12, 64 * 2**20),
        DeviceKind("h100", "cuda", int(79.1 * GIB), 3350e9, 990e12, 232448),
        DeviceKind("h200", "cuda", int(140.4 * GIB), 4800e9, 990e12, 232448),
    )
}
"""Kinds by name. A tpu7x chip is two devices; each has half the chip's rates."""

EVERY_KIND = ("tpu7x:2x2x1", "v5p:2x2x1", "v6e:2x2", "v5e:2x2", "h200:8", "h100:8")
"""A topology of each kind, as `topology` takes them."""

MARKS = {"v5 lite": "v5e", "v5e": "v5e", "v5p": "v5p", "v5": "v5p", "v6": "v6e", "7x": "tpu7x"} | {
    "h100": "h100",
    "h200": "h200",
}


def kind_of(device_kind: str) -> DeviceKind | None:
    """The kind of a device by JAX's name for it (`TPU v5 lite`, `NVIDIA H100 80GB HBM3`), None if unknown."""
    name = device_kind.lower()
    return next((KINDS[kind] for mark, kind in MARKS.items() if mark in name), None)


def topology(name: str) -> list[jax.Device]:
    """Devices for ahead-of-time compiles.

    Args:
      name: `KIND:SHAPE`. The shape of TPUs is that of the torus in chips (`v5e:2x4`, `v5p:2x2x2`,
        `tpu7x:2x2x1`); of GPUs it is `DEVICES` of one host or `HOSTSxDEVICES` (`h100:8`, `h100:2x8`).

    Raises:
      ValueError: the kind is unknown or the shape is malformed.
      RuntimeError: the compiler for the kind is not installed (extra `aot`).
    """
    kind, _, shape = name.partition(":")
    if kind not in KINDS:
        raise ValueError(f"topology {name!r}: kind {kind!r} is unknown; use one of {', '.join(KINDS)}.")
    if not shape or not all(part.isdigit() and int(part) for part in shape.split("x")):
        example = "2x4" if KINDS[kind].platform == "tpu" else "8"
        raise ValueError(f"topology {name!r}: {shape!r} is no shape; give for example {kind}:{example}.")
    most = {"v5e": 2, "v6e": 2}.get(kind, 3)  # these are flat tori
    if shape.count("x") >= most:
        raise ValueError(f"topology {name!r}: {kind} has shapes of {most} numbers at most; got {shape}.")
    try:
        return _tpu(kind, shape) if KINDS[kind].platform == "tpu" else _gpu(kind, shape)
    except (jax.errors.JaxRuntimeError, ModuleNotFoundError, NotImplementedError, KeyError) as error:
        raise RuntimeError(
            f"topology {name!r}: no compiler for it here ({error}). Install trillion-infer[aot]; TPU shapes "
            "must be whole hosts, and a process with real GPUs must run with JAX_PLATFORMS=cpu."
        ) from error


NO_TPU_HERE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
}
"""What libtpu would otherwise ask a metadata server, and complain that there is none. It does not limit topologies."""


def _tpu(kind: str, shape: str) -> list[jax.Device]:
    for name, value in NO_TPU_HERE.items():
        os.environ.setdefault(name, value)
    return list(topologies.get_topology_desc(f"{kind}:{shape}", "tpu").devices)


def _gpu(kind: str, shape: str) -> list[jax.Device]:
    device = KINDS[kind]
    memory = {"h100": 84978434048, "h200": 150754820096}[kind]
    description = {"h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200"}[kind]
    config = HOPPER.format(bandwidth=int(device.bandwidth), memory=memory, name=description)
    parts = [int(part) for part in shape.split("x")]
    hosts, devices = (1, parts[0]) if len(parts) == 1 else (prod(parts[:-1]), parts[-1])
    described = topologies.get_topology_desc(
        kind, platform="cuda", target_config=config, topology=f"1x{hosts}x{devices}"
    )
    return list(described.devices)


def mesh(name: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> jax.sharding.Mesh:
    """A mesh over the first devices of a topology, in its order."""
    devices = topology(name)
    if prod(shape) > len(devices):
        raise ValueError(f"topology {name!r} has {len(devices)} devices; a mesh of {shape} needs {prod(shape)}.")
    return jax.sharding.Mesh(np.array(devices[: prod(shape)], dtype=object).reshape(shape), axes)

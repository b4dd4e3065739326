"""Which implementation of each op a platform gets: the one place that knows what was measured where."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pallas_kernels.cpu_native import native, prefer
from sharding.heads import round_up
from trillion_infer.cache.layout import PoolLayout
from trillion_infer.core.errors import ConfigError
from trillion_infer.layers.context import Ops


def choose_ops(
    mesh: Mesh, dtype: str, attention: str = "auto", interpret: bool = False, int8_activations: bool = False
) -> Ops:
    """Ops for a mesh and a parameter dtype.

    On CPU activations are float32 whatever the weights: XLA's bfloat16 arithmetic there is slower (except large
    products on cores with AMX) and less exact. The native kernels read weights and pages in place, if they can be
    built; XLA serves otherwise. With bfloat16 and `int8_activations` they round activations to int8 where weights are
    packed, 32 at a time (W4A8, W8A8: docs/quantisation.md says what it costs); with float32 nothing is rounded.
    """
    platform = platform_of(mesh)
    backend = attention_backend(platform, attention, interpret)
    if platform != "cpu":
        copies = "stream" if platform == "gpu" else "beside"
        return Ops(activation=dtype, attention=backend, interpret=interpret, expert_copies=copies)
    natively = multiplies_blocks(mesh, attention)
    return Ops(
        activation="float32",
        attention=backend,
        matmul="cpu" if natively else "xla",
        interpret=interpret,
        expert_copies="beside" if backend in ("tpu", "gpu") else "first",
        int8_activations=int8_activations and natively and dtype == "bfloat16",
    )


def settle_isa(mesh: Mesh, isa: str) -> None:
    """Has the native kernels of this process use an instruction set. Raises ConfigError for one that is not here."""
    if platform_of(mesh) != "cpu":
        if isa != "auto":
            raise ConfigError(f"cpu_isa is {isa!r}, but the mesh is of {platform_of(mesh)} devices. Leave cpu_isa out.")
        return
    try:
        prefer(isa)
    except ValueError as error:
        raise ConfigError(f"cpu_isa is {error}. Use one of these.") from error


def multiplies_blocks(mesh: Mesh, attention: str) -> bool:
    """Whether native kernels multiply the blocks of a GGUF for an engine of this `attention`."""
    return platform_of(mesh) == "cpu" and attention in ("auto", "cpu") and bool(native().isas)


def attention_backend(platform: str, attention: str, interpret: bool) -> str:
    """Backend of the ops for an engine's `attention`. Raises ConfigError where there are no such kernels here."""
    kernels = {"pallas": "tpu" if platform == "cpu" else platform}.get(attention, attention)
    if kernels in ("tpu", "gpu") and kernels != platform and not interpret:
        raise ConfigError(
            f"attention is {attention!r}, but Pallas kernels for {kernels} do not run on {platform} devices. Use "
            f"attention='auto' or 'reference', or interpret=True, which runs them slowly on CPU, for tests."
        )
    return kernels


def pool_platform(mesh: Mesh, attention: str, interpret: bool) -> str:
    """The platform whose pools the ops take: the mesh's, or that of the kernels that are interpreted."""
    platform = platform_of(mesh)
    backend = attention_backend(platform, attention, interpret)
    return backend if interpret and backend in ("tpu", "gpu") else platform


def platform_of(mesh: Mesh) -> str:
    """tpu, gpu or cpu: of the mesh's devices, which need not be here."""
    platform = mesh.devices.flat[0].platform
    return "gpu" if platform in ("cuda", "rocm") else platform


def default_page_size(platform: str, slot_shards: int, least: int = 1) -> int:
    """Positions a page, of which each of `slot_shards` devices holds its part, on accelerators a tile of 16 or more.

    Small pages share more of a prefix, large ones move faster. least: see `page_part`.
    """
    size, part = {"tpu": (64, 16), "gpu": (32, 16)}.get(platform, (32, 1))
    part = max(part, least)
    return round_up(max(size, part * slot_shards), slot_shards * least)


def page_part(platform: str, layout: PoolLayout) -> int:
    """What a device's positions of a page must be a multiple of for the platform's kernels to read a pool in place."""
    if platform != "tpu":
        return 1
    if layout.quantised:
        return 128
    return 32 // jnp.dtype(layout.dtype).itemsize if layout.key.kind == "latent" else 1


def device_memory(device: jax.Device) -> tuple[int, int] | None:
    """(limit, in use) in bytes, where the platform says."""
    stats = device.memory_stats()
    return (stats["bytes_limit"], stats["bytes_in_use"]) if stats and "bytes_limit" in stats else None

"""A compiled program as the runtime's own bytes and a description in JSON, and back, without tracing.

jax.experimental.serialize_executable wraps the same bytes in a pickle of jax's objects. Here the objects are rebuilt
from the program's abstract arguments and the description: this file is the one that knows how jax keeps them.
"""

from typing import Any

import jax
import numpy as np
from jax._src import core
from jax._src.interpreters import pxla
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax._src.stages import ArgInfo
from jax.experimental.layout import Layout
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from trillion_infer.engine.bundle import trees


class NotBundled(Exception):
    """Why a program cannot be written to, or taken from, a bundle."""


def pack(compiled: jax.stages.Compiled) -> tuple[bytes, dict[str, Any]]:
    """The runtime's bytes and what must be known beside the arguments. Raises NotBundled."""
    unloaded = getattr(compiled._executable, "_unloaded_executable", None)
    if unloaded is None:
        raise NotBundled("the runtime does not serialise programs")
    special = ("unordered_effects", "ordered_effects", "host_callbacks", "keepalive", "mut")
    found = [name for name in special if getattr(unloaded, name, None)]
    if compiled._params.const_args:
        found.append("const_args")
    if found:
        raise NotBundled(f"it has {', '.join(found)}, which a bundle does not hold")
    try:
        description = {
            "name": unloaded.name,
            "kept": sorted(unloaded.kept_var_idx),
            "outputs": [_leaf(a, s) for a, s in zip(unloaded.output_avals, unloaded.output_shardings, strict=True)],
            "tree": trees.encode(compiled.out_tree),
        }
    except trees.UnknownNode as error:
        raise NotBundled(str(error)) from error
    return _serialise(unloaded.xla_executable), description


def _serialise(executable: Any) -> bytes:
    try:
        if isinstance(executable, xla_client.LoadedExecutable):
            return executable.client.serialize_executable(executable)
        return executable.serialize()
    except (jax.errors.JaxRuntimeError, AttributeError, NotImplementedError) as error:
        raise NotBundled(f"the runtime does not serialise it: {str(error).splitlines()[0]}") from error


def describe_arguments(args: tuple[Any, ...]) -> list[list[Any]]:
    """Shape, dtype, split and, where one is asked for, layout of every leaf of abstract arguments, as JSON."""
    return [[*_leaf(leaf, leaf.sharding), *_layout(leaf)] for leaf in jax.tree.leaves(args)]


def unpack(
    payload: bytes, description: dict[str, Any], args: tuple[Any, ...], donated: tuple[int, ...], mesh: Mesh
) -> jax.stages.Compiled:
    """The program for the abstract `args` it was compiled for, of which `donated` are given away. Raises NotBundled."""
    devices = xla_client.DeviceList(tuple(mesh.devices.flat))
    client = mesh.devices.flat[0].client
    leaves, tree = jax.tree.flatten((args, {}))
    gone = [i in donated for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
    avals = [core.ShapedArray(leaf.shape, leaf.dtype) for leaf in leaves]
    kept = description["kept"]
    outputs = description["outputs"]
    try:
        out_tree = trees.decode(description["tree"])
        if out_tree.num_leaves != len(outputs) or not all(0 <= i < len(leaves) for i in kept):
            raise NotBundled("its description contradicts itself")
        executable = client.deserialize_executable(payload, executable_devices=devices)
        layouts = _layouts(executable, [leaves[i] for i in kept])
        unloaded = pxla.UnloadedMeshExecutable(
            xla_executable=executable,
            device_list=devices,
            backend=client,
            input_avals=[avals[i] for i in kept],
            input_shardings=[leaves[i].sharding for i in kept],
            output_avals=[
                core.ShapedArray(tuple(shape), np.dtype(dtype), weak_type=weak) for shape, dtype, _, weak in outputs
            ],
            output_shardings=[NamedSharding(mesh, _spec(spec)) for _, _, spec, _ in outputs],
            committed=True,
            name=description["name"],
            unordered_effects=[],
            ordered_effects=[],
            keepalive=[],
            host_callbacks=[],
            kept_var_idx=set(kept),
            mut=None,
            xla_in_layouts=layouts,
            dispatch_in_layouts=layouts,
            xla_out_layouts=[None] * len(outputs),
            all_args_info=None,
            pgle_profiler=None,
        )
    except (jax.errors.JaxRuntimeError, trees.UnknownNode) as error:
        raise NotBundled(f"it does not load: {str(error).splitlines()[0]}") from error
    except TypeError as error:
        raise NotBundled(f"this jax keeps programs in another way ({error})") from error
    infos = tree.unflatten([ArgInfo(aval, given) for aval, given in zip(avals, gone, strict=True)])
    return jax.stages.Compiled(unloaded.load(), [], infos, out_tree, no_kwargs=True)


def _leaf(value: Any, sharding: Any) -> list[Any]:
    if not isinstance(sharding, NamedSharding):
        raise NotBundled(f"an array is placed by {type(sharding).__name__}, not by named axes")
    if sharding.memory_kind not in (None, "device", _default_memory(sharding)):
        raise NotBundled(f"an array lies in {sharding.memory_kind} memory")
    spec = [list(part) if isinstance(part, tuple) else part for part in sharding.spec]
    return [list(value.shape), np.dtype(value.dtype).name, spec, bool(getattr(value, "weak_type", False))]


def _layout(leaf: Any) -> list[list[int]]:
    """The order of axes in memory that is asked for, major to minor, in a list; empty where none is."""
    return [list(leaf.format.layout.major_to_minor)] if leaf.format.layout else []


def _layouts(executable: Any, arguments: list[Any]) -> list[Layout | None]:
    """As the runtime wants the arguments that ask for a layout; None for the others."""
    if not any(leaf.format.layout for leaf in arguments):
        return [None] * len(arguments)
    found = map(Layout.from_pjrt_layout, executable.get_parameter_layouts())
    return [laid if leaf.format.layout else None for leaf, laid in zip(arguments, found, strict=True)]


def _default_memory(sharding: NamedSharding) -> str | None:
    try:
        return next(iter(sharding.device_set)).default_memory().kind
    except (jax.errors.JaxRuntimeError, AttributeError, NotImplementedError):
        return None  # devices that are not here


def _spec(parts: list[Any]) -> P:
    return P(*(tuple(part) if isinstance(part, list) else part for part in parts))

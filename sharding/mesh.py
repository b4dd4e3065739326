"""Device meshes by name, and disjoint sub-meshes."""

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

AXES = ("stage", "data", "expert", "sequence", "tensor")
"""Every mesh has these axes, of size 1 where not asked for. `tensor` varies fastest: its devices are neighbours.

stage: pipeline stages. data: requests. expert: experts of a mixture. sequence: positions. tensor: heads and ffn width.
"""


def parse_mesh(text: str | Mapping[str, int] | None) -> dict[str, int]:
    """Sizes by axis from "data=1,tensor=4" or a dict; unknown axes and sizes below one raise ValueError."""
    if text is None or text == "":
        pairs: list[tuple[str, object]] = []
    elif isinstance(text, str):
        pairs = [_split(item) for item in text.split(",")]
    else:
        pairs = list(text.items())
    sizes: dict[str, int] = dict.fromkeys(AXES, 1)
    seen = set()
    for name, value in pairs:
        if name not in AXES:
            raise ValueError(f"mesh axis {name!r} is unknown; the axes are {', '.join(AXES)}.")
        if name in seen:
            raise ValueError(f"mesh axis {name!r} is given twice.")
        seen.add(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"mesh axis {name} is {value!r}; its size must be a whole number of 1 or more.")
        sizes[name] = value
    return sizes


def _split(item: str) -> tuple[str, object]:
    name, sep, value = item.strip().partition("=")
    if not sep:
        raise ValueError(f'mesh item {item!r} is not of the form axis=size, as in "data=1,tensor=4".')
    return name.strip(), int(value) if value.strip().isdecimal() else value


def make_mesh(sizes: str | Mapping[str, int] | Mesh | None, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over the first devices; all five axes are present. More devices than there are raise ValueError.

    A `jax.sharding.Mesh` whose axes are among AXES is taken over its own devices.
    """
    if isinstance(sizes, Mesh):
        return _complete(sizes)
    shape = parse_mesh(sizes)
    devices = jax.devices() if devices is None else list(devices)
    need = math.prod(shape.values())
    if need > len(devices):
        asked = ", ".join(f"{name}={size}" for name, size in shape.items() if size > 1)
        raise ValueError(f"the mesh {asked} needs {need} devices; there are {len(devices)}. Ask for fewer.")
    return Mesh(np.asarray(devices[:need], dtype=object).reshape(tuple(shape.values())), AXES)


def _complete(mesh: Mesh) -> Mesh:
    unknown = set(mesh.axis_names) - set(AXES)
    if unknown:
        raise ValueError(f"mesh axes {sorted(unknown)} are unknown; the axes are {', '.join(AXES)}.")
    order = [name for name in AXES if name in mesh.axis_names]
    devices = np.transpose(mesh.devices, [mesh.axis_names.index(name) for name in order])
    return Mesh(devices.reshape([mesh.shape.get(name, 1) for name in AXES]), AXES)


def parse_split(text: str) -> dict[str, tuple[int, int]]:
    """Groups and devices a group of each role, from "prefill=4,decode=4" or "prefill=2x2,decode=4"."""
    roles: dict[str, tuple[int, int]] = {}
    for item in text.split(","):
        name, _, value = item.strip().partition("=")
        groups, sep, size = value.partition("x")
        if (
            name not in ("prefill", "decode")
            or name in roles
            or not groups.isdecimal()
            or (sep and not size.isdecimal())
        ):
            raise ValueError(f'{text!r} is not of the form "prefill=4,decode=4" or "prefill=2x2,decode=4".')
        roles[name] = (int(groups), int(size)) if sep else (1, int(groups))
        if min(roles[name]) < 1:
            raise ValueError(f"{item!r} asks for no device; give each role at least one.")
    if set(roles) != {"prefill", "decode"}:
        raise ValueError(f'{text!r} must name both roles, as in "prefill=4,decode=4".')
    return roles


def sub_meshes(text: str, devices: Sequence[jax.Device] | None = None) -> dict[str, list[Mesh]]:
    """Disjoint meshes (tensor-parallel within a group) for each role of `parse_split`."""
    devices = jax.devices() if devices is None else list(devices)
    roles = parse_split(text)
    need = sum(groups * size for groups, size in roles.values())
    if need > len(devices):
        raise ValueError(f"{text!r} needs {need} devices; there are {len(devices)}. Ask for fewer.")
    meshes: dict[str, list[Mesh]] = {}
    start = 0
    for role, (groups, size) in roles.items():
        meshes[role] = []
        for _ in range(groups):
            meshes[role].append(make_mesh({"tensor": size}, devices[start : start + size]))
            start += size
    return meshes

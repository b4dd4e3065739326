"""Whether a mesh can hold a model's weights, asked before anything is loaded or compiled."""

import os
from typing import TYPE_CHECKING

import jax

from sharding.rules import SERVE_RULES, mesh_axes, shards
from sharding.topologies import KINDS
from trillion_infer.config.model import AttentionSpec, MoESpec
from trillion_infer.core.errors import OutOfMemoryError
from trillion_infer.engine.budget import RESERVE
from trillion_infer.engine.ops import device_memory, platform_of

if TYPE_CHECKING:
    from trillion_infer.engine.build import Blueprint

GIB = 2**30


def check_fits(blueprint: "Blueprint", name: str, room: int) -> None:
    """Raises OutOfMemoryError where a device `name` with `room` bytes for weights and KV cannot hold its weights.

    The message says how many devices of each kind hold them, split as this library splits them.
    """
    weights = blueprint.weight_bytes_per_device()
    if weights < room:
        return
    total = total_weight_bytes(blueprint)
    needed = ", ".join(f"{total // (kind.memory - RESERVE[kind.platform]) + 1} {kind.name}" for kind in KINDS.values())
    devices = blueprint.mesh.devices.size
    fix = "Use more devices, a mesh that splits more, or a quantised checkpoint."
    if total // devices < room:
        axis = "expert" if any(isinstance(layer.ffn, MoESpec) for layer in blueprint.family.config.layers) else "tensor"
        fix = f"Use mesh={axis}={devices}, which leaves {total / devices / GIB:.2f} GiB on each."
    if uneven := uneven_splits(blueprint):
        fix = f"{' '.join(uneven)} {fix}"
    raise OutOfMemoryError(
        f"the weights of {blueprint.family.config.family} are {weights / GIB:.2f} GiB on each device of this mesh; "
        f"{name} has {room / GIB:.2f} GiB for them. Split over every axis the {total / GIB:.1f} GiB need at least "
        f"{needed}, before any KV. {fix}"
    )


def uneven_splits(blueprint: "Blueprint") -> list[str]:
    """A sentence for each part of the model that the mesh does not divide, so that devices hold padding; it says what
    number of devices would."""
    counts: dict[tuple[str, int], str] = {}
    for layer in blueprint.family.config.layers:
        mixer, ffn = layer.mixer, layer.ffn
        counts["kv_heads" if isinstance(mixer, AttentionSpec) else "heads", mixer.heads] = "heads"
        if isinstance(ffn, MoESpec):
            counts["experts", ffn.experts] = "experts"
            counts["expert_ffn", ffn.width] = "columns of an expert"
        else:
            counts["ffn", ffn.width] = "columns of the ffn"
    sentences = []
    for (logical, count), noun in counts.items():
        parts = shards(SERVE_RULES, logical, blueprint.mesh.shape)
        if count % parts == 0:
            continue
        axes = [axis for axis in mesh_axes(SERVE_RULES, logical) if blueprint.mesh.shape[axis] > 1]
        asked = " x ".join(f"{axis}={blueprint.mesh.shape[axis]}" for axis in axes)
        fitting = [n for n in range(1, count + 1) if count % n == 0]
        near = [max(n for n in fitting if n < parts), *[n for n in fitting if n > parts][:1]]
        sentences.append(
            f"{asked} does not divide the {count} {noun}, which are padded; {' or '.join(map(str, near))} would."
        )
    return sentences


def total_weight_bytes(blueprint: "Blueprint") -> int:
    """Bytes of all parameters, each held once."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(blueprint.abstract_params))


def check_fits_here(blueprint: "Blueprint") -> None:
    """`check_fits` with what the devices of the blueprint's mesh have; where they do not say, with host memory."""
    device = next(d for d in blueprint.mesh.devices.flat if d.process_index == jax.process_index())
    memory = device_memory(device)
    if memory is None:
        host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        local = sum(d.process_index == device.process_index for d in blueprint.mesh.devices.flat)
        check_fits(blueprint, f"this host's share of a device of {local}", host // local)
        return
    check_fits(blueprint, f"a {device.device_kind}", memory[0] - RESERVE.get(platform_of(blueprint.mesh), GIB))

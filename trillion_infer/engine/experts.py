"""Experts outside device memory: which parameters lie there, and the cache of hot ones on the devices."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trillion_infer.config.experts import ExpertMemory
from trillion_infer.core.errors import ConfigError
from trillion_infer.engine.ops import platform_of
from trillion_infer.layers.expert_cache import HITS, MISSES, ExpertCache
from trillion_infer.weights.spec import ParamSpec

SHARE = 4
"""Where the user names no bytes the cache holds one in so many experts, and at least those of a layer."""


def on_host(spec: ParamSpec) -> bool:
    """True for the stacks of routed experts' matrices; their biases stay on the device."""
    return "experts" in spec.axes and spec.in_axes > 0


def check_mesh(mesh: Mesh, asked: ExpertMemory) -> None:
    """Raises ConfigError for a mesh on which experts cannot come from there."""
    if asked.place == "disk" and platform_of(mesh) != "cpu":
        raise ConfigError(
            f"expert_memory is disk and the devices are {platform_of(mesh)}s, which copy out of pinned memory only. "
            "Use host."
        )
    wide = [axis for axis in ("data", "stage", "sequence") if mesh.shape[axis] > 1]
    if wide:
        raise ConfigError(
            f"expert_memory is {asked.place} and the mesh has {', '.join(f'{a}={mesh.shape[a]}' for a in wide)}; "
            "experts outside device memory work with the axes expert and tensor. Set the others to 1."
        )


def abstract_cache(specs: Mapping[str, ParamSpec], params: Mapping[str, Any], num_bytes: float) -> ExpertCache:
    """The cache for a model's abstract parameters. num_bytes: of all devices together, 0 for the library's choice.

    Raises ConfigError where the model has no experts, where layers differ in them, or where `num_bytes` holds
    fewer than the experts of one layer on each device.
    """
    names = sorted(name for name, spec in specs.items() if on_host(spec))
    if not names:
        raise ConfigError("expert_memory is given, but the model has no experts. Leave it out.")
    pairs = [(params[name], params[name.removesuffix("down") + "gate_up"]) for name in names if name.endswith("down")]
    if len({str(jax.tree.map(lambda leaf: (leaf.shape[1:], leaf.dtype), pair)) for pair in pairs}) > 1:
        raise ConfigError("expert_memory is given, but the experts of this model's layers differ in shape or format.")
    down, gate_up = pairs[0]
    one: Any = jax.tree.leaves(down)[0]
    mesh, axes = one.sharding.mesh, one.sharding.spec[1]
    experts = one.shape[1]
    local = one.sharding.shard_shape(one.shape)[1]
    shards, layers = experts // local, sum(jax.tree.leaves(pair[0])[0].shape[0] for pair in pairs)
    each = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)[2:]) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves((down, gate_up))
    )
    slots = int(num_bytes / mesh.devices.size // each) if num_bytes else max(local, -(-layers * local // SHARE))
    if slots < local:
        raise ConfigError(
            f"expert_memory gives each device {slots} experts of {each} bytes; the {local} experts of one layer have "
            f"to fit. Use host:{local * each * mesh.devices.size} or more."
        )

    def array(shape: tuple[int, ...], spec: PartitionSpec, dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def held(leaf: Any) -> Any:
        rest = (*leaf.sharding.spec, *[None] * leaf.ndim)[2 : leaf.ndim]
        return array((shards * slots, *leaf.shape[2:]), PartitionSpec(axes, *rest), leaf.dtype)

    by_shard = PartitionSpec(axes)
    return ExpertCache(
        jax.tree.map(held, gate_up),
        jax.tree.map(held, down),
        array((layers, experts), PartitionSpec(None, axes), jnp.int32),
        array((shards * slots,), by_shard, jnp.int32),
        array((layers, experts), PartitionSpec(None, axes), jnp.int32),
        array((shards, 3), by_shard, jnp.int32),
    )


def stats(cache: ExpertCache | None) -> dict[str, float]:
    """How many experts of all layers and steps were in the cache, and how many came from the host."""
    if cache is None:
        return {}
    hits, misses = np.asarray(cache.counts).sum(axis=0)[[HITS, MISSES]].tolist()
    return {"expert_hits": hits, "expert_misses": misses, "expert_hit_rate": hits / max(1, hits + misses)}

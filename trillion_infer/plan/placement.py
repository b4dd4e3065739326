"""A deployment on the devices of a topology: its own or another, checked before anything is compiled."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from sharding.mesh import make_mesh, parse_mesh, sub_meshes
from sharding.topologies import KINDS, DeviceKind, topology
from trillion_infer.config.deployment import Deployment
from trillion_infer.config.engine import EngineConfig
from trillion_infer.config.roles import ROLES, role_config
from trillion_infer.core.errors import ConfigError
from trillion_infer.engine import budget
from trillion_infer.engine.build import Blueprint, Packing, plan_engine
from trillion_infer.engine.draft_plan import describe_drafters
from trillion_infer.engine.fits import check_fits, total_weight_bytes
from trillion_infer.models import read_family
from trillion_infer.weights.quant_config import read_quantisation
from trillion_infer.weights.quant_load import abstract_described, routed_experts


def roles_of(deployment: Deployment) -> tuple[str | None, ...]:
    """The roles that a deployment has programs of their own for; (None,) where one mesh does both."""
    return ROLES if deployment.options.get("disaggregate") else (None,)


def plan_deployment(
    deployment: Deployment, topology_name: str | None = None, mesh: str | None = None, role: str | None = None
) -> tuple[Blueprint, DeviceKind, str]:
    """The deployment on the devices of a topology (default: its own), their kind and the topology's name.

    mesh: in place of the deployment's own, of which the widest axis takes all devices of another topology.
    role: one of `roles_of`, default: the last; the plan is that of its first mesh, and `mesh` is left out.

    Raises ConfigError for what does not fit together, UnsupportedModelError, and OutOfMemoryError that says how many
    devices of each kind hold the weights; nothing is compiled yet.
    """
    name = topology_name or deployment.topology
    if not name:
        raise ConfigError(f"config {deployment.name!r} has no topology of its own; give one, for example v5e:2x4.")
    if deployment.hf_config is None:
        raise ConfigError(f"config {deployment.name!r} has no hf_config, so there is no model to compile.")
    role = role or roles_of(deployment)[-1]
    if role and mesh:
        raise ConfigError(f"config {deployment.name!r} gives each role a mesh of its own; leave --mesh out.")
    family = read_family(deployment.hf_config)
    known = EngineConfig.__dataclass_fields__
    options = {key: value for key, value in deployment.options.items() if key in known}
    own = deployment.options.get("mesh")
    try:
        devices = topology(name)
        if role:
            placed = sub_meshes(deployment.options["disaggregate"], devices)[role][0]
        elif mesh or isinstance(own, Mesh) or name == deployment.topology:
            placed = make_mesh(mesh or own, devices)
        else:
            placed = _mesh_of_all(own, devices, name)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"config {deployment.name!r}: {error}") from error
    packing = described_packing(deployment.hf_config)
    whole = EngineConfig(**options)
    config = whole if role is None else role_config(whole, role)
    drafters = describe_drafters(whole.speculate)
    blueprint = plan_engine(family, placed, config, packing, drafters, role)
    kind = KINDS[name.partition(":")[0]]
    check_fits(blueprint, f"a {kind.name}", kind.memory - budget.RESERVE[kind.platform])
    return blueprint, kind, name


def _mesh_of_all(own: str | Mapping[str, int] | None, devices: list[jax.Device], name: str) -> Mesh:
    """The mesh with its widest axis grown or shrunk to take every device; raises ValueError where the rest of it does
    not divide their number."""
    sizes = parse_mesh(own)
    widest = max(reversed(sizes), key=lambda axis: sizes[axis])  # tensor where all are 1
    others = math.prod(sizes.values()) // sizes[widest]
    if len(devices) % others:
        asked = ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
        raise ValueError(
            f"{name} has {len(devices)} devices, of which the mesh {asked} cannot take all; "
            f"give --mesh with sizes whose product is {len(devices)} or less."
        )
    return make_mesh({**sizes, widest: len(devices) // others}, devices)


def kv_limit(blueprint: Blueprint, kind: DeviceKind) -> int:
    """Bytes of all devices that weights held once, without temporaries, replicas or padding, would leave for KV."""
    return blueprint.mesh.devices.size * (kind.memory - budget.RESERVE[kind.platform]) - total_weight_bytes(blueprint)


def described_packing(hf_config: Mapping[str, Any]) -> Packing | None:
    """Which weights of a model that is not here stay packed, by its quantization_config."""
    format, plain = read_quantisation(hf_config)
    if format is None:
        return None
    return partial(abstract_described, format=format, plain=plain, select=routed_experts)

"""What a deployment can hold and how fast its devices could at best be, by arithmetic: nothing is compiled."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sharding.topologies import DeviceKind
from trillion_infer.config.deployment import Deployment
from trillion_infer.core.errors import ConfigError
from trillion_infer.engine import budget
from trillion_infer.engine.build import Blueprint
from trillion_infer.plan.compile_report import GIB, compile_deployment, copies, plan_deployment, tokens_held
from trillion_infer.plan.cost import step_cost


@dataclass(frozen=True)
class ContextCapacity:
    """Requests of one length on all devices. kv_gib: of one request, replicas counted once.

    decode_tok_s: most tokens a second with as many requests as fit and run at once, by what the devices' memory
    bandwidth and arithmetic allow.
    """

    context: int
    requests: int
    running: int
    kv_gib: float
    decode_tok_s: float
    bound: str


@dataclass(frozen=True)
class Capacity:
    """A deployment's memory; names as in compile.py's report. temporaries: where temp_gib_per_device is from.

    prefill_tok_s: most prompt tokens a second, attention over earlier tokens not counted.
    """

    config: str
    topology: str
    device_kind: str
    devices: int
    memory_gib_per_device: float
    weights_gib_per_device: float
    temp_gib_per_device: float
    temporaries: str
    reserved_gib_per_device: float
    kv_gib_total: float
    kv_tokens: int
    kv_bytes_per_token: int
    max_model_len: int
    prefill_tok_s: float
    contexts: tuple[ContextCapacity, ...]

    def as_json(self) -> dict[str, Any]:
        """The object that `plan.py --json` prints."""
        return asdict(self)


def plan_capacity(
    deployment: Deployment,
    topology: str | None = None,
    contexts: Sequence[int] = (),
    temp_gib: float | None = None,
    compiled: bool = False,
) -> Capacity:
    """Memory and limits of a deployment on a topology (default: its own).

    contexts: lengths of requests to tell about; default: powers of 8 from 4,096 to the deployment's longest.
    temp_gib: a device's temporaries; compiled: take them from the compiler's hungriest step. Without either they count
    as nothing, and what is left for KV is an upper bound.

    Raises ConfigError, and OutOfMemoryError for a mesh that cannot hold the weights or one page.
    """
    blueprint, kind, name = plan_deployment(deployment, topology)
    temporaries = "given" if temp_gib is not None else "not counted"
    if compiled:
        temp_gib, temporaries = compile_deployment(deployment, name, only_largest=True).temp / GIB, "compiled"
    reserved, weights = budget.RESERVE[kind.platform], blueprint.weight_bytes_per_device()
    temp = int((temp_gib or 0.0) * GIB)
    free = kind.memory - reserved - weights - temp
    longest = blueprint.max_model_len
    lengths = sorted(set(contexts)) or _lengths(longest)
    if bad := [length for length in lengths if not 0 < length <= longest]:
        raise ConfigError(f"--contexts has {bad[0]}; {deployment.name} takes 1 to {longest} tokens.")
    tokens = tokens_held(blueprint, free)
    prefill = max(blueprint.programs(tuple(1 for _ in blueprint.layouts)).buckets.mixed)
    seconds = max(*_seconds(step_cost(blueprint, prefill), kind))
    return Capacity(
        config=deployment.name,
        topology=name,
        device_kind=blueprint.mesh.devices.flat[0].device_kind,
        devices=blueprint.mesh.devices.size,
        memory_gib_per_device=round(kind.memory / GIB, 3),
        weights_gib_per_device=round(weights / GIB, 3),
        temp_gib_per_device=round(temp / GIB, 3),
        temporaries=temporaries,
        reserved_gib_per_device=round(reserved / GIB, 3),
        kv_gib_total=round(max(0, free) * copies(blueprint) / GIB, 3),
        kv_tokens=tokens,
        kv_bytes_per_token=round(max(0, free) * copies(blueprint) / max(1, tokens)),
        max_model_len=longest,
        prefill_tok_s=round(prefill.tokens * blueprint.data / seconds, 1),
        contexts=tuple(_at(length, blueprint, kind, free) for length in lengths),
    )


def _lengths(longest: int) -> list[int]:
    return [*(length for length in (4096, 32768, 262144, 2097152) if length < longest), longest]


def _at(context: int, blueprint: Blueprint, kind: DeviceKind, free: int) -> ContextCapacity:
    """Requests of `context` tokens in `free` bytes a device, and the rate of a step that decodes them."""
    shards, extend = blueprint.data, blueprint.max_batch_tokens
    _, own = budget.request_needs(blueprint.layouts, blueprint.mesh, context, extend, blueprint.beside())
    requests = max(0, free // own) * shards
    running = min(requests, blueprint.config.max_running * shards)
    if not running:
        return ContextCapacity(context, requests, 0, round(own * copies(blueprint) / shards / GIB, 3), 0.0, "memory")
    decode = blueprint.programs(tuple(1 for _ in blueprint.layouts)).buckets.choose(
        running // shards or 1, running // shards or 1, decode_only=True
    )
    flops, held = step_cost(blueprint, decode)
    arithmetic, reading = _seconds((flops, held + own * (running / shards)), kind)
    return ContextCapacity(
        context,
        requests,
        running,
        round(own * copies(blueprint) / shards / GIB, 3),
        round(running / max(arithmetic, reading), 1),
        "bandwidth" if reading >= arithmetic else "arithmetic",
    )


def _seconds(cost: tuple[float, float], kind: DeviceKind) -> tuple[float, float]:
    """Least time of (operations, bytes) on a device: of its arithmetic in bfloat16, of its memory."""
    flops, moved = cost
    return flops / kind.bf16_flops, moved / kind.bandwidth

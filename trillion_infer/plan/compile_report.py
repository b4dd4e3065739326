"""Compiling a deployment for devices that are not here, and what its memory then holds."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from pallas_kernels.common.backends import UnsupportedError
from sharding.mesh import parse_mesh
from sharding.rules import kv_plan
from trillion_infer.cache.layout import PoolLayout
from trillion_infer.config.deployment import Deployment
from trillion_infer.config.model import AttentionSpec, cache_key
from trillion_infer.core.errors import OutOfMemoryError
from trillion_infer.engine import budget
from trillion_infer.engine.build import Blueprint
from trillion_infer.engine.fits import uneven_splits
from trillion_infer.engine.programs import Program, Programs, ProgramSet, compile_program, sampler_name
from trillion_infer.engine.sizing import open_source
from trillion_infer.plan.cost import step_cost
from trillion_infer.plan.placement import kv_limit, plan_deployment

GIB = 2**30
PROBE_SHARE = 0.85
"""Of what the weights leave, for the pools that the hungriest step is first compiled with."""


@dataclasses.dataclass(frozen=True)
class DrafterShare:
    """What a model that drafts takes of the figures of a report. Bytes a device; kv: of each byte of KV."""

    name: str
    weights: int
    kv: float


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """Bytes a device, except `kv_bytes` and `kv_limit`: of all devices, replicas counted once.

    pages: of each pool on a data shard, as the programs were compiled.
    kv_limit: what weights held once, without temporaries, replicas or padding, would leave: no layout can have more.
    notes: what is worth knowing. bundle_bytes: size of the bundle written, 0 for none.
    role, device_ids: prefill or decode, and the devices of its first mesh, where the deployment sets them apart.
    """

    config: str
    topology: str
    device_kind: str
    devices: int
    weights: int
    temp: int
    reserved: int
    kv_bytes: int
    kv_limit: int
    kv_tokens: int
    pages: tuple[int, ...]
    programs: tuple[Program, ...]
    notes: tuple[str, ...]
    bundle_bytes: int = 0
    drafters: tuple[DrafterShare, ...] = ()
    role: str | None = None
    device_ids: tuple[int, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The object that `compile.py --json` prints."""
        return {
            "config": self.config,
            "topology": self.topology,
            "device_kind": self.device_kind,
            "devices": self.devices,
            "weights_gib_per_device": _gib(self.weights),
            "temp_gib_per_device": _gib(self.temp),
            "reserved_gib_per_device": _gib(self.reserved),
            "kv_gib_total": _gib(self.kv_bytes),
            "kv_tokens": self.kv_tokens,
            "drafters": [
                {"name": d.name, "weights_gib_per_device": _gib(d.weights), "kv_share": round(d.kv, 4)}
                for d in self.drafters
            ],
            "programs": [
                {
                    "name": p.name,
                    "compile_s": round(p.seconds, 2),
                    "temp_gib": _gib(p.temp_bytes),
                    "flops": p.flops,
                    "bytes": p.bytes,
                }
                for p in self.programs
            ],
            **({"bundle_bytes": self.bundle_bytes} if self.bundle_bytes else {}),
            **({"role": self.role, "device_ids": list(self.device_ids)} if self.role else {}),
        }


def compile_deployment(
    deployment: Deployment,
    topology_name: str | None = None,
    mesh: str | None = None,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
    only_largest: bool = False,
    bundle: str | None = None,
    role: str | None = None,
) -> CompileReport:
    """Compiles every program, or the largest step (with drafters one that verifies; of the role decode the largest of
    decode alone, too) and the samplers of the most rows; `progress(next, done, total)`.

    bundle: folder in which an executable bundle of what was compiled is written, for LLM(bundle=…) on such devices.

    The hungriest step is compiled first, with pools that take most of what weights leave, or, where its temporaries
    then do not fit, of one page. Its temporaries and arguments fix the pools that all programs are compiled with.
    Kernels of the platform are asked for by name; where one refuses, the program is compiled with whatever runs and
    the refusal is among the notes.
    """
    blueprint, kind, topology_name = plan_deployment(deployment, topology_name, mesh, role)
    reserved = budget.RESERVE[kind.platform]
    notes = [*_mesh_notes(deployment, blueprint), *uneven_splits(blueprint)]
    buckets = _programs(blueprint, _one_page(blueprint))[0].buckets
    largest = max(buckets.all).name
    progress(largest, 0, 1)
    first, pages = _probe(largest, blueprint, kind.memory - reserved, notes)
    weights = _weight_bytes(first, blueprint, pages)
    compiled = [first]
    if only_largest:
        sized = _programs(blueprint, pages)
        names = [sampler_name(bucket) for bucket in (buckets.mixed[-1], *buckets.verify[-1:])]
        names += [bucket.name for bucket in buckets.decode[-1:] if role == "decode"]
    else:
        free = kind.memory - weights - first.temp_bytes - reserved
        pages = _pages(blueprint, free, blueprint.config.max_running)
        sized = _programs(blueprint, pages)
        names, compiled = sized[0].names(), []
    for done, name in enumerate(names):
        progress(name, done, len(names))
        compiled.append(_compile(name, sized, notes))
    drafting = _compile_drafters(blueprint, sized, largest if only_largest else None, progress, notes)
    bundled = 0
    if bundle:
        options = dataclasses.replace(blueprint.config, bundle=bundle)
        source = open_source(dataclasses.replace(blueprint, config=options))
        assert source is not None
        bundled = source.save([(program, sized[1].build(program.name)[1]) for program in compiled], pages)
        notes += [reason for reason in source.reasons if "cannot be bundled" in reason]
    compiled += drafting
    temp = max(program.temp_bytes for program in compiled)
    free = kind.memory - weights - temp - reserved
    return CompileReport(
        config=deployment.name,
        topology=topology_name,
        device_kind=blueprint.mesh.devices.flat[0].device_kind,
        devices=blueprint.mesh.devices.size,
        weights=weights,
        temp=temp,
        reserved=reserved,
        kv_bytes=max(0, free) * copies(blueprint),
        kv_limit=kv_limit(blueprint, kind),
        kv_tokens=tokens_held(blueprint, free),
        pages=pages,
        programs=tuple(_with_cost(program, sized[0], blueprint) for program in compiled),
        notes=tuple(dict.fromkeys(notes)),
        bundle_bytes=bundled,
        drafters=_drafters(blueprint),
        role=role,
        device_ids=tuple(device.id for device in blueprint.mesh.devices.flat),
    )


def _mesh_notes(deployment: Deployment, blueprint: Blueprint) -> list[str]:
    """Says what mesh is used where it is not the deployment's own."""
    own, sizes = deployment.options.get("mesh"), dict(blueprint.mesh.shape)
    if isinstance(own, Mesh) or blueprint.role or parse_mesh(own) == sizes:
        return []
    used = ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one device"
    return [f"the mesh is {used}; {deployment.name} has its own for {deployment.topology}, {own}."]


def _with_cost(program: Program, programs: Programs, blueprint: Blueprint) -> Program:
    """Steps with the cost that the model says; others with the compiler's."""
    bucket = next((bucket for bucket in programs.buckets.all if bucket.name == program.name), None)
    if bucket is None:
        return program
    flops, held_bytes = step_cost(blueprint, bucket)
    return dataclasses.replace(program, flops=flops, bytes=held_bytes)


def _one_page(blueprint: Blueprint) -> tuple[int, ...]:
    return tuple(1 for _ in blueprint.layouts)


def _probe(name: str, blueprint: Blueprint, memory: int, notes: list[str]) -> tuple[Program, tuple[int, ...]]:
    """The step compiled, and the pages of the pools it was compiled with."""
    free = int(PROBE_SHARE * (memory - blueprint.weight_bytes_per_device()))
    try:
        pages = _pages(blueprint, free, blueprint.config.max_running)
        return _compile(name, _programs(blueprint, pages), notes), pages
    except OutOfMemoryError:
        pages = _one_page(blueprint)
        return _compile(name, _programs(blueprint, pages), notes), pages


def _programs(blueprint: Blueprint, pages: tuple[int, ...]) -> tuple[Programs, Programs]:
    """The programs with the platform's own kernels, and with whatever runs."""
    strict = dataclasses.replace(blueprint, config=dataclasses.replace(blueprint.config, attention="pallas"))
    return strict.programs(pages), blueprint.programs(pages)


def _compile_drafters(
    blueprint: Blueprint,
    programs: tuple[Programs, Programs],
    only: str | None,
    progress: Callable[[str, int, int], None],
    notes: list[str],
) -> list[Program]:
    """The programs of the models that draft; with `only`, those of the step of that name and of the most rows."""
    strict = dataclasses.replace(
        blueprint, drafts=tuple(plan.with_attention("pallas", blueprint.mesh) for plan in blueprint.drafts)
    )
    compiled = []
    for pair in zip(strict.draft_programs(programs[0]), blueprint.draft_programs(programs[1]), strict=True):
        names, drafter = pair[0].names(), pair[0].plan.name
        if only is not None:
            rows = max(bucket.sequences for bucket in pair[0].buckets.all)
            names = [name for name in (f"{drafter}_extend_{only}", f"{drafter}_chain_{rows}") if name in names]
        for done, name in enumerate(names):
            progress(name, done, len(names))
            compiled.append(_compile(name, pair, notes))
    return compiled


def _drafters(blueprint: Blueprint) -> tuple[DrafterShare, ...]:
    mesh, beside = blueprint.mesh, blueprint.beside()
    page = sum(budget.local_page_bytes(lay, mesh) for lay in (*blueprint.layouts, *(y for x in beside for y in x)))
    return tuple(
        DrafterShare(
            plan.name,
            plan.weight_bytes_per_device(mesh),
            sum(budget.local_page_bytes(layout, mesh) for layout in plan.layouts) / page,
        )
        for plan in blueprint.drafts
    )


def _compile(name: str, programs: tuple[ProgramSet, ProgramSet], notes: list[str]) -> Program:
    strict, lenient = programs
    try:
        return compile_program(name, *strict.build(name))
    except UnsupportedError as error:
        notes.append(str(error))
        return compile_program(name, *lenient.build(name))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemoryError(f"{name} does not fit the device: {str(error).splitlines()[0]}") from error


def _weight_bytes(program: Program, blueprint: Blueprint, pages: tuple[int, ...]) -> int:
    """Bytes a device that the compiler gives the parameters of a step, padding of their layouts included."""
    arguments = program.run.memory_analysis().argument_size_in_bytes  # pyright: ignore
    state = blueprint.state_shape(pages).abstract(blueprint.mesh)
    drafters = sum(plan.weight_bytes_per_device(blueprint.mesh) for plan in blueprint.drafts)
    own = max(arguments - _local_bytes((state.pools, state.tables)), blueprint.weight_bytes_per_device() - drafters)
    return own + drafters


def _local_bytes(tree: Any) -> int:
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _pages(blueprint: Blueprint, free: int, requests: int) -> tuple[int, ...]:
    """Pages of each pool on a data shard that `free` bytes a device hold, at most those of `requests` full requests."""
    groups = budget.divide(
        blueprint.layouts,
        blueprint.mesh,
        free,
        max_running=requests,
        max_model_len=blueprint.max_model_len,
        extend_len=blueprint.max_batch_tokens,
        beside=blueprint.beside(),
    )
    return tuple(group.num_pages for group in groups)


def tokens_held(blueprint: Blueprint, free: int) -> int:
    """Positions of full requests that the devices hold. Pools that see a window or chunk are shared in proportion."""
    pages = _pages(blueprint, free, 1 << 30)
    whole = [n for n, lay in zip(pages, blueprint.layouts, strict=True) if not (lay.key.window or lay.key.chunk)]
    return min(whole or pages) * blueprint.layouts[0].page_size * blueprint.data


def copies(blueprint: Blueprint) -> int:
    """Devices whose pools differ: the mesh, less those that hold the same pages and heads."""
    return min(_distinct(layout, blueprint) for layout in blueprint.layouts)


def _distinct(layout: PoolLayout, blueprint: Blueprint) -> int:
    leaf = layout.abstract(blueprint.data, blueprint.mesh)
    shards = math.prod(leaf.shape) // math.prod(leaf.sharding.shard_shape(leaf.shape))
    mixers = (layer.mixer for layer in blueprint.family.config.layers)
    mixer = next(mixer for mixer in mixers if cache_key(mixer) == layout.key)
    if not isinstance(mixer, AttentionSpec):
        return shards
    return shards // kv_plan(mixer.heads, mixer.kv_heads, blueprint.mesh.shape)[0].replicas


def _gib(size: float) -> float:
    return round(size / GIB, 3)

"""From a checkpoint to an engine that is ready: weights load while programs compile."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from pallas_kernels.cpu_native import native
from pallas_kernels.quantised_matmul.formats import QuantisedTensor
from pallas_kernels.quantised_matmul.tpu_layouts import as_kernels_read, lay_out
from sharding.heads import round_up
from sharding.rules import SERVE_RULES, named_sharding, shards
from trillion_infer.cache.kv_cache import KVCache
from trillion_infer.cache.layout import PoolLayout, pool_layouts
from trillion_infer.cache.naming import BlockNamer
from trillion_infer.config.cache import CacheGroup
from trillion_infer.config.engine import PAGE_SIZES, EngineConfig
from trillion_infer.config.experts import ExpertMemory, parse_expert_memory
from trillion_infer.config.model import ModelConfig, MoESpec
from trillion_infer.config.scheduler import SchedulerConfig
from trillion_infer.config.stages import stage_plan
from trillion_infer.core.errors import ConfigError
from trillion_infer.core.importing import quick_imports
from trillion_infer.core.timeline import Timeline
from trillion_infer.engine import budget, experts
from trillion_infer.engine.buckets import SMALLEST_PREFILL, layered_buckets, make_buckets
from trillion_infer.engine.draft_length import draft_length
from trillion_infer.engine.engine import Engine
from trillion_infer.engine.fits import check_fits_here
from trillion_infer.engine.layered import can_run_by_layers
from trillion_infer.engine.memory import device_bytes, give_back_freed_memory, is_on_device, told_as_ours
from trillion_infer.engine.ops import (
    attention_backend,
    choose_ops,
    default_page_size,
    page_part,
    platform_of,
    pool_platform,
    settle_isa,
)
from trillion_infer.engine.programs import Programs, ProgramSet
from trillion_infer.engine.sizing import prepare, size_pools
from trillion_infer.engine.state import StateShape
from trillion_infer.layers.expert_cache import ExpertCache
from trillion_infer.models import Family
from trillion_infer.params.blocks import padded_vocab
from trillion_infer.params.decoder import decoder_params
from trillion_infer.params.tree import flat
from trillion_infer.schedule.scheduler import Scheduler
from trillion_infer.weights.quantise import abstract_quantised
from trillion_infer.weights.rounding import RECIPES
from trillion_infer.weights.spec import HOST_MEMORY, ParamSpec

if TYPE_CHECKING:
    from trillion_infer.distributed.group import Follower, Group, Leader
    from trillion_infer.engine.draft_plan import DraftPlan, DraftSource
    from trillion_infer.engine.drafting import DraftPrograms
    from trillion_infer.engine.many_hosts import FollowingEngine
    from trillion_infer.layers.decoder import Decoder

Loader = Callable[[dict[str, Any], dict[str, Any], str], dict[str, jax.Array]]
"""load(specs, shardings, dtype) -> arrays by parameter path."""

Packing = Callable[[dict[str, ParamSpec], dict[str, Any]], Mapping[str, QuantisedTensor]]
"""packing(specs, shardings) -> abstract weights by path, of the parameters that stay quantised in device memory."""


@dataclass
class BuildReport:
    """What start-up did when, and what was chosen."""

    timeline: Timeline = field(default_factory=Timeline)
    weights_bytes: int = 0
    host_bytes: int = 0
    kv_bytes: int = 0
    programs: list[ProgramSet] = field(default_factory=list)

    @property
    def temp_bytes(self) -> int:
        """Temporaries of the hungriest program that is there."""
        return max((each.temp_bytes for each in self.programs), default=0)

    def add(self, other: "BuildReport") -> None:
        """Takes in what another engine of the same process took."""
        self.weights_bytes += other.weights_bytes
        self.host_bytes += other.host_bytes
        self.kv_bytes += other.kv_bytes
        self.programs += other.programs


@dataclass(frozen=True)
class Blueprint:
    """Everything about an engine that needs no weights: what compile.py and plan.py work on, too."""

    family: Family
    mesh: Mesh
    config: EngineConfig
    dtype: str
    layouts: tuple[PoolLayout, ...]
    max_model_len: int
    max_batch_tokens: int
    packing: Packing | None = None
    drafts: "tuple[DraftPlan, ...]" = ()
    role: str | None = None
    shares_tiers: bool = False

    @property
    def model_shards(self) -> int:
        """Devices that see the same tokens and split heads, ffn width and vocabulary."""
        return shards(SERVE_RULES, "heads", self.mesh.shape)

    @property
    def data(self) -> int:
        return self.mesh.shape["data"]

    @cached_property
    def model(self) -> "Decoder":
        """The model's module. Only tracing needs it, and importing flax takes a sixth of a start."""
        with quick_imports():
            from trillion_infer.layers.decoder import Decoder
        return Decoder(self.family.config, self.family.names, dict(self.mesh.shape))

    @cached_property
    def specs(self) -> dict[str, ParamSpec]:
        """The model's parameters by path."""
        return flat(decoder_params(self.family.config, self.family.names, dict(self.mesh.shape)))

    @cached_property
    def shardings(self) -> dict[str, NamedSharding]:
        """Where each parameter lies; the parts of a quantised one lie alike."""
        placed = {name: named_sharding(self.mesh, spec.axes, SERVE_RULES) for name, spec in self.specs.items()}
        if self.expert_memory is None:
            return placed
        return {n: s.with_memory_kind(HOST_MEMORY) if experts.on_host(self.specs[n]) else s for n, s in placed.items()}

    @property
    def expert_memory(self) -> ExpertMemory | None:
        """See `parse_expert_memory`."""
        return parse_expert_memory(self.config.expert_memory)

    def expert_cache(self) -> ExpertCache | None:
        """The abstract cache of experts; None where they lie on the devices."""
        if self.expert_memory is None:
            return None
        asked = self.expert_memory.device_bytes
        return experts.abstract_cache(self.specs, self.abstract_params, asked)

    @cached_property
    def abstract_params(self) -> dict[str, Any]:
        """Shapes, dtypes, shardings and, where a TPU needs them, layouts of the parameters; `QuantisedTensor`s of them
        where weights stay packed."""
        plain = {
            name: jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype or self.dtype), sharding=self.shardings[name])
            for name, spec in self.specs.items()
        }
        return plain if self.packing is None else plain | as_kernels_read(self.packing(self.specs, self.shardings))

    def state_shape(self, pages: tuple[int, ...]) -> StateShape:
        page_size = self.layouts[0].page_size
        return StateShape(
            self.layouts,
            pages,
            self.config.max_running,
            -(-self.max_model_len // page_size),
            padded_vocab(self.family.config.vocab, shards(SERVE_RULES, "vocab", self.mesh.shape)),
            self.config.penalties,
            self.expert_cache(),
        )

    def programs(self, pages: tuple[int, ...]) -> Programs:
        """The programs for pools of these pages; nothing is compiled yet."""
        ops = choose_ops(
            self.mesh, self.dtype, self.config.attention, self.config.interpret, self.config.int8_activations
        )
        if self.expert_memory is not None and self.expert_memory.place == "disk":
            ops = replace(ops, mapped_experts=bool(native().isas))
        drafts = draft_length(self.config)
        smallest = SMALLEST_PREFILL.get(platform_of(self.mesh), 64)
        buckets = make_buckets(self.config.max_running, self.max_batch_tokens, drafts, smallest)
        if can_run_by_layers(self):
            most = self.config.prefill_chunk if self.config.chunked_prefill else self.max_batch_tokens
            buckets = replace(buckets, layered=layered_buckets(most))
        buckets = buckets if self.role is None else buckets.for_role(self.role)
        state = self.state_shape(pages).abstract(self.mesh)
        taken = {number for plan in self.drafts for number in plan.model.aux_layers}
        aux_layers = tuple(sorted(taken)) if self.drafts else None
        config, model = self.family.config, lambda: self.model
        whole = not self.config.chunked_prefill
        shapes = buckets, ops, self.abstract_params, state
        return Programs(config, model, self.mesh, *shapes, aux_layers=aux_layers, whole_prompts=whole)

    def draft_programs(self, programs: Programs) -> "tuple[DraftPrograms, ...]":
        """The programs of the models that draft beside `programs`."""
        if not self.drafts:
            return ()
        from trillion_infer.engine.drafting import DraftPrograms

        aux_layers, length = programs.aux_layers or (), draft_length(self.config)
        shared = (self.mesh, programs.buckets, self.family.config, programs.params, programs.state, aux_layers, length)
        return tuple(DraftPrograms(plan, *shared) for plan in self.drafts)

    def beside(self) -> list[list[PoolLayout]]:
        """For each cache group, the pools of drafters that have its pages."""
        return [[lay for d in self.drafts if d.group == i for lay in d.layouts] for i in range(len(self.layouts))]

    def groups(self, temp_bytes: int, agree: Callable[[int], int] = lambda number: number) -> list[CacheGroup]:
        """Pages of each pool on each data shard, within the KV budget that the processes `agree` on."""
        taken = temp_bytes + self.weight_bytes_per_device()
        return budget.divide(
            self.layouts,
            self.mesh,
            agree(budget.available(self.mesh, self.config.kv_memory, taken)),
            max_running=self.config.max_running,
            max_model_len=self.max_model_len,
            extend_len=self.max_batch_tokens,
            taken=self._taken(temp_bytes),
            beside=self.beside(),
        )

    def _taken(self, temp_bytes: int) -> str:
        """What else is on a device; nothing to say where the budget was given in bytes."""
        if self.config.kv_memory is not None and self.config.kv_memory > 1:
            return ""
        return f"weights take {self.weight_bytes_per_device():,}, program temporaries {temp_bytes:,}"

    def weight_bytes_per_device(self) -> int:
        """Bytes of parameters on one device, those of drafters and the cache of experts among them."""
        drafters = sum(plan.weight_bytes_per_device(self.mesh) for plan in self.drafts)
        return drafters + device_bytes((self.abstract_params, self.expert_cache()))


def plan_engine(
    family: Family,
    mesh: Mesh,
    config: EngineConfig,
    packing: Packing | None = None,
    drafters: "Sequence[DraftSource]" = (),
    role: str | None = None,
    shares_tiers: bool = False,
) -> Blueprint:
    """Checks the options against the model and the mesh. Raises ConfigError before anything is loaded.

    packing: which weights stay quantised as the checkpoint has them; None: none. `config.quantize` rounds plain ones.
    drafters: models that draft, as `open_drafters` gives them. role: prefill or decode, where the other has a mesh of
    its own. shares_tiers: it will have tiers that are not its own.
    """
    model_config = family.config
    _check_mesh(mesh, model_config)
    settle_isa(mesh, config.cpu_isa)
    draft_length(config)
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if model_config.dtype == "float32" else "bfloat16"
    max_model_len = config.max_model_len or model_config.max_len
    if max_model_len > model_config.max_len:
        raise ConfigError(
            f"max_model_len is {max_model_len}; the model's positions end at {model_config.max_len}. Lower it."
        )
    max_batch_tokens = max(config.prefill_chunk, config.max_running + 1)
    if not config.chunked_prefill:
        max_batch_tokens = max_model_len + config.max_running
    max_batch_tokens = round_up(max_batch_tokens, mesh.shape["sequence"])
    kv_dtype = config.kv_dtype if config.kv_dtype not in (None, "auto") else dtype
    page_size = _page_size(config, model_config, mesh, kv_dtype)
    platform = pool_platform(mesh, config.attention, config.interpret)
    layouts = pool_layouts(model_config, page_size, kv_dtype, dict(mesh.shape), platform)
    if config.quantize in RECIPES:
        if packing is not None:
            raise ConfigError(
                f"quantize is {config.quantize!r}, but the weights of this {model_config.family} are quantised "
                "already. Leave quantize out."
            )
        packing = partial(abstract_quantised, recipe=config.quantize)
    sizes = max_model_len, max_batch_tokens
    blueprint = Blueprint(family, mesh, config, dtype, layouts, *sizes, packing, role=role, shares_tiers=shares_tiers)
    if drafters:
        from trillion_infer.engine.draft_plan import plan_drafters

        drafts = plan_drafters(drafters, family, blueprint.model, mesh, config, dtype, layouts)
        blueprint = replace(blueprint, drafts=drafts)
    if blueprint.expert_memory is not None:
        experts.check_mesh(mesh, blueprint.expert_memory)
        blueprint.expert_cache()
    return blueprint


def _check_mesh(mesh: Mesh, model: ModelConfig) -> None:
    try:
        stage_plan(model, mesh.shape["stage"])
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if mesh.shape["expert"] > 1 and not any(isinstance(layer.ffn, MoESpec) for layer in model.layers):
        raise ConfigError(
            f"mesh axis expert is {mesh.shape['expert']}, but {model.family} has no experts. Set expert=1."
        )


def _page_size(config: EngineConfig, model: ModelConfig, mesh: Mesh, kv_dtype: str) -> int:
    """Positions a page: as asked or the platform's own.

    Raises ConfigError where devices cannot share it evenly, and where the kernels that were asked for cannot read it.
    """
    platform = pool_platform(mesh, config.attention, config.interpret)
    layouts = pool_layouts(model, 1, kv_dtype, dict(mesh.shape), platform)
    parts = max(shards(SERVE_RULES, layout.slot_axis, mesh.shape) for layout in layouts)
    least = max(page_part(platform, layout) for layout in layouts)
    size = config.page_size or default_page_size(platform, parts, least)
    if size % parts:
        fitting = ", ".join(str(n) for n in PAGE_SIZES if n % parts == 0)
        raise ConfigError(
            f"page_size is {size}; on this mesh {parts} devices share the slots of a page of {model.family}, and "
            f"{size} does not divide by {parts}. {f'Use {fitting}, or leave' if fitting else 'Leave'} page_size out."
        )
    asked = attention_backend(platform_of(mesh), config.attention, config.interpret)
    if asked == platform and size % (parts * least):
        raise ConfigError(
            f"page_size is {size}, of which a device holds {size // parts} positions; {platform.upper()} kernels read "
            f"pages of {model.family} in {kv_dtype} of a multiple of {least} positions a device. Leave page_size out."
        )
    return size


def build_engine(
    blueprint: Blueprint,
    load: Loader,
    fingerprint: bytes,
    progress: Callable[[str, int, int], None] | None = None,
    engine_type: type[Engine] = Engine,
    group: "Group | None" = None,
    timeline: Timeline | None = None,
) -> "tuple[Engine | FollowingEngine, BuildReport]":
    """Loads weights and compiles programs side by side, sizes the KV pools, and returns an engine that is ready.

    group: the processes that build the same engine together, if there are several; a follower's engine only follows.
    progress(phase, done, total) is called for "load" (bytes) and "compile" (programs), possibly from two threads.
    Raises OutOfMemoryError when not one page fits, ModelLoadError when the checkpoint does not fit the model.
    ConfigError when a tier beyond device memory cannot be had, before anything is loaded.
    """
    tell = progress or (lambda phase, done, total: None)
    report = BuildReport(timeline or Timeline())
    phase, config = report.timeline.phase, blueprint.config
    if config.debug_kernels and group is not None:
        raise ConfigError("debug_kernels reads every page table, which several processes cannot. Use one process.")
    if blueprint.drafts and group is not None:
        raise ConfigError(f"speculate names {blueprint.drafts[0].name}, which drafts within one process. Use one.")
    check_fits_here(blueprint)
    tiering = _open_tiers(blueprint, fingerprint) if config.has_tiers else None
    with ThreadPoolExecutor(1) as pool, ExitStack() as unless_built:
        loading = pool.submit(_timed, phase("load weights"), lambda: _load(blueprint, load))
        with phase("size pools, open bundle"):
            caches, programs = size_pools(blueprint, None if group is None else _agreement(group))
        unless_built.callback(programs.stop)
        if group is not None and group.leads:
            from trillion_infer.distributed.calls import Recorder

            programs.recorder = Recorder(cast("Leader", group).send, programs.mesh)
        drafting = blueprint.draft_programs(programs)
        if config.precompile:
            pages = tuple(cache.num_pages for cache in caches)
            with phase("load or compile programs"):
                behind = platform_of(blueprint.mesh) == "cpu" and group is None and not programs.buckets.verify
                prepare(programs, pages, partial(tell, "compile"), behind)
                for each in drafting:
                    each.compile_all(partial(tell, "compile"))
        shape = blueprint.state_shape(tuple(cache.num_pages for cache in caches))
        with phase("allocate pools"), told_as_ours("the KV pools", _holders(blueprint, shape, programs)):
            state = shape.allocate(blueprint.mesh, programs.get("make_pools").run if group is None else None)
        params = loading.result()
        unless_built.pop_all()
    if programs.compiled:
        give_back_freed_memory()
    report.weights_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params) if is_on_device(leaf))
    report.host_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) - report.weights_bytes
    report.kv_bytes = sum(pool.nbytes for pool in state.kv_pools)
    report.programs = [programs, *drafting]
    if group is not None:
        group.agree("built", 0, min)
    if group is not None and not group.leads:
        from trillion_infer.engine.many_hosts import FollowingEngine
        from trillion_infer.engine.pool_sides import pool_side

        return FollowingEngine(programs, state, params, cast("Follower", group), pool_side(blueprint)), report
    schedulers = [_scheduler(blueprint, caches, fingerprint) for _ in range(blueprint.data)]
    speculation = None
    if config.speculate:
        from trillion_infer.engine.speculation import Speculation

        models = [plan.name for plan in blueprint.drafts]
        speculation = Speculation(config, programs.buckets, blueprint.data, models)
    make = engine_type if group is None else _lead(programs, cast("Leader", group), (params, state))
    engine = make(programs, state, params, schedulers, config.run_ahead, speculation)
    for plan, compiled in zip(blueprint.drafts, drafting, strict=True):
        from trillion_infer.engine.drafting import ModelDrafter

        engine.drafters.append(ModelDrafter(compiled, plan.load(blueprint.mesh, params)))
    if config.debug_kernels:
        from trillion_infer.engine.guard import BatchGuard

        engine.guard = BatchGuard(blueprint.layouts)
    if tiering is not None:
        tiering(engine)
    return engine, report


def _open_tiers(blueprint: Blueprint, fingerprint: bytes) -> Callable[[Engine], None]:
    """Opens the tiers that the options ask for; what it returns puts them behind an engine."""
    from trillion_infer.cache.tiers.stack import TierStack
    from trillion_infer.engine.page_copies import PageCopier
    from trillion_infer.engine.pool_sides import pool_side
    from trillion_infer.engine.tiering import attach_tiers

    copier = PageCopier(pool_side(blueprint))
    tiers = copier.open_tiers(blueprint.config, fingerprint + blueprint.dtype.encode())
    return lambda engine: attach_tiers(engine, TierStack(tiers), copier)


def _agreement(group: "Group") -> Callable[[int], int]:
    """The least of every process's number."""
    return lambda number: group.agree("kv_memory", number, min)


def _lead(programs: Programs, group: "Leader", held: Any) -> Callable[..., Engine]:
    """The engine of the process that leads; `held` is there in every process."""
    from trillion_infer.engine.many_hosts import LeadingEngine

    assert programs.recorder is not None
    programs.recorder.know(held)
    return partial(LeadingEngine, group=group)


def _holders(blueprint: Blueprint, shape: StateShape, programs: Programs) -> dict[str, int]:
    """Bytes on a device, by holder, when everything is in place."""
    state = shape.abstract(blueprint.mesh)
    pools = {f"kv_{lay.key.name}": pool for lay, pool in zip(blueprint.layouts, state.kv_pools, strict=True)}
    return {
        "weights": blueprint.weight_bytes_per_device(),
        **{name: device_bytes(pool) for name, pool in pools.items()},
        "page_tables": device_bytes(state.tables),
        "sampler": device_bytes(state.sampler),
        "program_temporaries": programs.temp_bytes,
    }


def _load(blueprint: Blueprint, load: Loader) -> dict[str, jax.Array]:
    with told_as_ours("the weights", {"weights": blueprint.weight_bytes_per_device()}):
        return lay_out(load(blueprint.specs, blueprint.shardings, blueprint.dtype), blueprint.abstract_params)


def _scheduler(blueprint: Blueprint, groups: list[CacheGroup], fingerprint: bytes) -> Scheduler:
    config, page_size = blueprint.config, blueprint.layouts[0].page_size
    layout = repr([(lay.key, lay.page_size, lay.dtype) for lay in blueprint.layouts]).encode()
    namer = BlockNamer(fingerprint + blueprint.dtype.encode(), layout, page_size)
    prefix = config.prefix_caching and not blueprint.family.config.prefix_depends_on_length
    limits = SchedulerConfig(
        max_running=config.max_running,
        max_batch_tokens=blueprint.max_batch_tokens,
        prefill_chunk=config.prefill_chunk,
        max_model_len=blueprint.max_model_len,
        max_waiting=config.max_waiting,
        chunked_prefill=config.chunked_prefill,
    )
    return Scheduler(limits, KVCache(groups, page_size, namer, enable_prefix=prefix))


def _timed(phase: AbstractContextManager[None], work: Callable[[], Any]) -> Any:
    with phase:
        return work()

"""From `speculate` and a target to the models that draft for it: checked before anything is compiled or loaded."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from sharding.rules import SERVE_RULES, named_sharding, shards
from trillion_infer.cache.layout import PoolLayout, pool_layouts
from trillion_infer.config.drafter import Eagle3Spec
from trillion_infer.config.engine import EngineConfig
from trillion_infer.config.model import ModelConfig, Segment
from trillion_infer.core.errors import ConfigError
from trillion_infer.engine.ops import choose_ops, pool_platform
from trillion_infer.layers.context import Ops
from trillion_infer.models import Family, read_family
from trillion_infer.models.eagle3 import IGNORED_TENSORS, read_eagle3
from trillion_infer.speculate import DrafterSpec, parse_speculate
from trillion_infer.weights.checkpoint import Checkpoint, open_checkpoint, read_json
from trillion_infer.weights.load import load_params
from trillion_infer.weights.orbax import OrbaxCheckpoint
from trillion_infer.weights.plan import plan_load
from trillion_infer.weights.spec import ParamSpec

if TYPE_CHECKING:
    from trillion_infer.layers.decoder import Decoder
    from trillion_infer.layers.draft import DraftModel


@dataclass(frozen=True)
class DraftSource:
    """A model that drafts, before it is fitted to a target. checkpoint: None where only its config.json is known."""

    spec: DrafterSpec
    config: Mapping[str, Any]
    checkpoint: Checkpoint | None = None


def open_drafters(speculate: str | None, target: Checkpoint | None) -> tuple[DraftSource, ...]:
    """The models that `speculate` names, opened; `mtp` lies in the target's checkpoint.

    Raises what parse_speculate and open_checkpoint raise.
    """
    sources = []
    for spec in parse_speculate(speculate):
        if not spec.on_host:
            checkpoint = open_checkpoint(spec.path) if spec.path else target
            sources.append(DraftSource(spec, checkpoint.config if checkpoint else {}, checkpoint))
    return tuple(sources)


def describe_drafters(speculate: str | None) -> tuple[DraftSource, ...]:
    """As `open_drafters`, of folders that need hold a config.json only: for compiling, not for running."""
    specs = [spec for spec in parse_speculate(speculate) if not spec.on_host]
    return tuple(DraftSource(s, read_json(Path(s.path) / "config.json") if s.path else {}) for s in specs)


@dataclass(frozen=True)
class DraftPlan:
    """A model fitted to its target. layouts: its pools, which have the pages of the target's cache group `group`."""

    name: str
    model: "DraftModel"
    layouts: tuple[PoolLayout, ...]
    group: int
    dtype: str
    source: DraftSource
    ignore: tuple[str, ...] = ()
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @cached_property
    def specs(self) -> dict[str, ParamSpec]:
        """Its own parameters by path."""
        from trillion_infer.layers.parameters import param_specs

        return param_specs(self.model.module)

    def abstract_params(self, mesh: Mesh, target: Mapping[str, Any]) -> dict[str, Any]:
        """Shapes and shardings of its parameters, the borrowed ones included."""
        own = {
            name: jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype or self.dtype), sharding=shardings[name])
            for shardings in [self.shardings(mesh)]
            for name, spec in self.specs.items()
        }
        return {**own, **{name: target[of] for name, of in self.model.borrowed.items()}}

    def with_attention(self, backend: str, mesh: Mesh) -> "DraftPlan":
        """The same with another backend of the attention ops."""
        return dataclasses.replace(self, model=self.model.with_ops(choose_ops(mesh, self.dtype, backend)))

    def shardings(self, mesh: Mesh) -> dict[str, NamedSharding]:
        return {name: named_sharding(mesh, spec.axes, SERVE_RULES) for name, spec in self.specs.items()}

    def weight_bytes_per_device(self, mesh: Mesh) -> int:
        """Bytes of its own parameters on one device."""
        own = self.abstract_params(mesh, dict.fromkeys(self.model.borrowed.values()))
        leaves = [leaf for leaf in own.values() if leaf is not None]
        return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)

    def load(self, mesh: Mesh, target: Mapping[str, Any]) -> dict[str, Any]:
        """Its parameters on the mesh, with those it borrows of the target."""
        assert self.source.checkpoint is not None
        options = {"dtype": self.dtype, "ignore": self.ignore, "tied": self.tied}
        own, _ = load_params(self.specs, self.source.checkpoint, self.shardings(mesh), **options)
        return {**own, **{name: target[of] for name, of in self.model.borrowed.items()}}


def plan_drafters(
    sources: Sequence[DraftSource],
    family: Family,
    target: "Decoder",
    mesh: Mesh,
    config: EngineConfig,
    dtype: str,
    layouts: Sequence[PoolLayout],
) -> tuple[DraftPlan, ...]:
    """Fits each model to the target. Raises ConfigError, naming both, for one that does not fit, and ModelLoadError
    for tensors that are missing."""
    if not sources:
        return ()
    named = f"speculate names {sources[0].spec.kind}"
    if config.expert_memory:
        raise ConfigError(f"{named}, which does not run beside experts in host memory; leave expert_memory out.")
    if mesh.shape["stage"] > 1:
        raise ConfigError(f"{named}, which does not run over pipeline stages, and mesh axis stage is above 1. Set 1.")
    full = [i for i, layout in enumerate(layouts) if not (layout.key.window or layout.key.chunk)]
    if not full:
        raise ConfigError(
            f"{named}, whose KV lies beside layers that see everything, and {family.config.family} has none; "
            "use ngram, suffix or grammar."
        )
    ops = choose_ops(mesh, dtype, config.attention, config.interpret, config.int8_activations)
    platform = pool_platform(mesh, config.attention, config.interpret)
    beside = layouts[full[0]], full[0]
    return tuple(_plan(source, family, target, mesh, ops, dtype, *beside, platform) for source in sources)


def _plan(
    source: DraftSource,
    family: Family,
    target: "Decoder",
    mesh: Mesh,
    ops: Ops,
    dtype: str,
    beside: PoolLayout,
    group: int,
    platform: str,
) -> DraftPlan:
    from trillion_infer.layers.decoder import Decoder
    from trillion_infer.layers.draft import MTP, Eagle3, SmallDecoder

    sizes, ignore, tied = dict(mesh.shape), (), {}
    if source.spec.kind == "mtp":
        model: DraftModel = MTP(target, sizes, ops, _mtp_config(source, family))
        ignore = (".*",)
    elif source.spec.kind == "eagle3":
        names = None if source.checkpoint is None else source.checkpoint.names()
        spec = read_eagle3(source.config, names)
        check_head(source.spec.path, spec, family.config)
        model, ignore = Eagle3(spec, target, sizes, ops), IGNORED_TENSORS
    else:
        generation = {} if source.checkpoint is None else source.checkpoint.generation_config
        small = read_family(source.config, generation)
        _check_vocabulary(f"draft:{source.spec.path}", small.config.vocab, family.config)
        model = SmallDecoder(Decoder(small.config, small.names, sizes), sizes, ops)
        ignore, tied = small.ignore, {small.names.head: small.names.embed}
    kv_dtype = dtype if beside.quantised else beside.dtype
    pools = pool_layouts(model.config, beside.page_size, kv_dtype, sizes, platform)
    for layout in pools:
        parts = shards(SERVE_RULES, layout.slot_axis, sizes)
        if beside.page_size % parts:
            raise ConfigError(
                f"page_size is {beside.page_size} and {parts} devices share the slots of a page of {source.spec.kind}; "
                f"give a page_size that {parts} divides."
            )
    plan = DraftPlan(source.spec.kind, model, pools, group, dtype, source, ignore, tied)
    if source.checkpoint is not None:
        plan_load(plan.specs, source.checkpoint, dtype=dtype, ignore=ignore, tied=tied)
    return plan


def _mtp_config(source: DraftSource, family: Family) -> ModelConfig:
    if not family.mtp_layers:
        raise ConfigError(
            f"speculate names mtp, and this {family.config.family} checkpoint has no MTP layer "
            "(num_nextn_predict_layers is 0 or absent); use eagle3:PATH, draft:PATH, ngram or suffix."
        )
    if isinstance(source.checkpoint, OrbaxCheckpoint):
        raise ConfigError("speculate names mtp, and a converted checkpoint holds no MTP layer; give the original one.")
    last = family.config.layers[-1]
    return dataclasses.replace(family.config, family="mtp", segments=(Segment((last,), 1),))


def _check_vocabulary(name: str, vocab: int, target: ModelConfig) -> None:
    if vocab != target.vocab:
        raise ConfigError(
            f"{name} has a vocabulary of {vocab} and its target {target.family} one of {target.vocab}; "
            "a drafter must have its target's vocabulary."
        )


def check_head(path: str | None, spec: Eagle3Spec, target: ModelConfig) -> None:
    """Raises ConfigError, naming both, for a head that was made for another target."""
    name, layers = f"eagle3:{path}", len(target.layers)
    _check_vocabulary(name, spec.target_vocab, target)
    if spec.target_width != target.width or (not spec.own_embed and spec.config.width != target.width):
        raise ConfigError(
            f"{name} was made for hidden states of width {spec.target_width} (its own is {spec.config.width}) and its "
            f"target {target.family} has width {target.width}; give a head that was trained for this target."
        )
    deepest = max(spec.aux_of(layers))
    if deepest > layers or min(spec.aux_of(layers)) < 0:
        raise ConfigError(
            f"{name} reads hidden states after layers {', '.join(map(str, spec.aux_of(layers)))} and its target "
            f"{target.family} has {layers} layers; give a head that was trained for this target."
        )

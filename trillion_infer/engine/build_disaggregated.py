"""Engines of both roles on meshes of one process, and what moves pages between them."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import Mesh

from trillion_infer.cache.tiers.stack import TierStack
from trillion_infer.config.engine import EngineConfig
from trillion_infer.config.roles import ROLES, role_config
from trillion_infer.core.timeline import Timeline
from trillion_infer.engine.build import Blueprint, BuildReport, Loader, Packing, build_engine, plan_engine
from trillion_infer.engine.disaggregated import DisaggregatedEngine, PrefillEngine
from trillion_infer.engine.draft_plan import DraftSource
from trillion_infer.engine.engine import Engine
from trillion_infer.engine.memory import keep_freed_memory
from trillion_infer.engine.page_copies import PageCopier
from trillion_infer.engine.pool_sides import pool_side
from trillion_infer.engine.tiering import share_tiers
from trillion_infer.models import Family
from trillion_infer.transfer.pages import PageMover


def build_disaggregated(
    family: Family,
    config: EngineConfig,
    meshes: dict[str, list[Mesh]],
    load: Loader,
    fingerprint: bytes,
    progress: Callable[[str, int, int], None] | None = None,
    packing: Packing | None = None,
    timeline: Timeline | None = None,
    drafters: Sequence[DraftSource] = (),
) -> tuple[DisaggregatedEngine, Blueprint, BuildReport]:
    """One engine a mesh of each role, and the movers between them; returns the first decode engine's blueprint.

    drafters: as of `plan_engine`. Prefill engines run them along, so that the KV they draft from travels with the
    prompt's. Raises ConfigError before anything is loaded.
    """
    kinds = {"prefill": PrefillEngine, "decode": Engine}
    report = BuildReport(timeline or Timeline())
    plans = [
        (role, plan_engine(family, mesh, role_config(config, role), packing, drafters, role, config.has_tiers))
        for role in ROLES
        for mesh in meshes[role]
    ]
    sides = [pool_side(blueprint) for _, blueprint in plans]
    split = len(meshes["prefill"])
    movers = [[PageMover(source, target) for target in sides[split:]] for source in sides[:split]]
    if any(mover.is_shared for row in movers for mover in row):
        keep_freed_memory()
    tiers = None
    if config.has_tiers:
        tiers = PageCopier(sides[0]).open_tiers(config, fingerprint + plans[0][1].dtype.encode())
    engines: list[Any] = []
    for role, blueprint in plans:
        engine, part = build_engine(blueprint, load, fingerprint, progress, kinds[role], timeline=report.timeline)
        engines.append(engine)
        report.add(part)
    for source, row in zip(engines[:split], movers, strict=True):
        for target, mover in zip(engines[split:], row, strict=True):
            target.replace_pools(mover.warm_up(source.all_pools, target.all_pools))
    if tiers:
        alike = sides[0].formats == sides[split].formats
        share_tiers(TierStack(tiers), list(zip(engines, sides, strict=True))[: None if alike else split])
    return DisaggregatedEngine(engines[:split], engines[split:], movers), plans[split][1], report

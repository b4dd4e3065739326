"""What an engine says of itself."""

from typing import TYPE_CHECKING

import jax
from jax.sharding import Mesh

from trillion_infer.engine import experts
from trillion_infer.engine.programs import Programs
from trillion_infer.engine.state import DeviceState
from trillion_infer.schedule.scheduler import Scheduler

if TYPE_CHECKING:
    from trillion_infer.engine.drafting import ModelDrafter
    from trillion_infer.engine.speculation import Speculation
    from trillion_infer.engine.tiering import KVTiering


class Figures:
    """The part of an engine that counts. The engine owns the fields."""

    programs: Programs
    schedulers: list[Scheduler]
    speculation: "Speculation | None"
    tiering: "KVTiering | None"
    drafters: "list[ModelDrafter]"
    steps: int
    _state: DeviceState

    def stats(self) -> dict[str, float]:
        """Sums over data shards of the schedulers' figures, the engine's own counters, and what speculation gave."""
        total: dict[str, float] = self.speculation.stats() if self.speculation is not None else {}
        compiled = self.programs.compiled + sum(drafter.programs.compiled for drafter in self.drafters)
        total |= {"steps": self.steps, "compilations": compiled, "programs_coming": len(self.programs.coming)}
        total |= experts.stats(self._state.expert_cache)
        for scheduler in self.schedulers:
            for name, value in scheduler.stats().items():
                total[name] = total.get(name, 0) + value
        if self.tiering is None:
            return total
        tiers = self.tiering.stats()
        stored = sum(tiers[f"kv_{tier.name}.hit_tokens"] for tier in self.tiering.stack.tiers)
        return {**total, **tiers, "kv_device.hit_tokens": max(0, total["prefix_hit_tokens"] - stored)}

    def meshes(self) -> list[tuple[str, Mesh]]:
        """The meshes that this runs on, by what they do."""
        return [("engine", self.programs.mesh)]

    def memory(self) -> dict[str, int]:
        """Bytes of what stays on the devices besides weights, and of KV beyond them, by holder."""
        state = self._state
        layouts = self.schedulers[0].cache.groups
        pools = {f"kv_{g.group.name}": pool.nbytes for g, pool in zip(layouts, state.kv_pools, strict=True)}
        if state.expert_cache is not None:
            pools["expert_cache"] = state.expert_cache.nbytes
        sampler = sum(leaf.nbytes for leaf in jax.tree.leaves(state.sampler))
        beyond = {} if self.tiering is None else self.tiering.memory()
        for drafter in self.drafters:
            pools |= drafter.memory()
        return {**pools, "page_tables": sum(table.nbytes for table in state.tables), "sampler": sampler, **beyond}

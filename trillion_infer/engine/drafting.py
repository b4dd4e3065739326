"""Models that draft beside an engine: their programs, their KV, and one run after each step of the target."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from trillion_infer.config.model import ModelConfig
from trillion_infer.core.request import Request
from trillion_infer.engine.batch import BatchLayout
from trillion_infer.engine.buckets import Bucket, Buckets
from trillion_infer.engine.draft_plan import DraftPlan
from trillion_infer.engine.programs import ProgramSet, abstract
from trillion_infer.engine.state import DeviceState, specs_of
from trillion_infer.sample import Sampled, Verified


@dataclass
class DraftPrograms(ProgramSet):
    """The programs of one drafter: an `extend` a bucket of the target, a `chain` a number of rows.

    state: the target's, for shapes. length: tokens of a chain; 0: none is drafted here, the KV alone is kept.
    """

    plan: DraftPlan
    mesh: Mesh
    buckets: Buckets
    target: ModelConfig
    target_params: dict[str, Any]
    state: DeviceState
    aux_layers: tuple[int, ...]
    length: int

    def extend(self, bucket: Bucket):
        return self.get(f"{self.plan.name}_extend_{bucket.name}")

    def chain(self, sequences: int):
        return self.get(f"{self.plan.name}_chain_{sequences}")

    def names(self) -> list[str]:
        rows = sorted({bucket.sequences for bucket in self.buckets.all}) if self.length else []
        extends = [f"{self.plan.name}_extend_{bucket.name}" for bucket in self.buckets.all]
        return [*extends, *(f"{self.plan.name}_chain_{count}" for count in rows)]

    def pools(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and shardings of the drafter's pools: the pages of the target's group."""
        pages = jax.tree.leaves(self.state.pools[self.plan.group])[0].shape[1]
        return tuple(layout.abstract(pages, self.mesh) for layout in self.plan.layouts)

    def build(self, name: str):
        from trillion_infer.engine.draft_step import make_chain, make_extend

        draft, mesh, plan = self.plan.model, self.mesh, self.plan
        data = mesh.shape["data"]
        pools, params = self.pools(), plan.abstract_params(mesh, self.target_params)
        specs, pool_specs = specs_of(params), specs_of(pools)
        table = self.state.tables[plan.group]
        kind, _, which = name.removeprefix(f"{plan.name}_").partition("_")
        if kind == "chain":
            fn = make_chain(draft, mesh, self.length, specs, pool_specs)
            return fn, (params, pools, table, self._start(data * int(which))), (1,)
        bucket = next(b for b in self.buckets.all if b.name == which)
        by_data = NamedSharding(mesh, P("data"))
        dtype, width = draft.ops.dtype, self.target.width
        packed = abstract(by_data, (data, BatchLayout(bucket).size))
        tokens = abstract(by_data, (data * bucket.tokens,))
        hidden = abstract(by_data, (data * bucket.tokens, width), dtype)
        new = tuple(self._whole(shape) for shape in _new_shapes(data, bucket))
        aux = (hidden,) * len(draft.aux_layers)
        fn = make_extend(draft, mesh, bucket, specs, pool_specs)
        return fn, (params, pools, table, packed, tokens, hidden, aux, new), (1,)

    def _start(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        start = {name: self._whole((rows,)) for name in ("token", "kv_lens", "slots")}
        start["count"] = self._whole((self.mesh.shape["data"],))
        if self.plan.model.shifted:
            start["states"] = self._whole((rows, self.plan.model.config.width), self.plan.model.ops.dtype)
        return start

    def _whole(self, shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return abstract(NamedSharding(self.mesh, P()), shape, dtype)


def _new_shapes(data: int, bucket: Bucket) -> list[tuple[int, ...]]:
    rows = data * bucket.sequences
    return [(rows, bucket.width), (rows,)] if bucket.verifies else [(rows,)]


@dataclass
class Drafted:
    """Drafts on their way from the device: row i of `tokens` and `chances` is for requests[i]; None: for nobody."""

    name: str
    requests: list[Request | None]
    tokens: jax.Array
    chances: jax.Array


class ModelDrafter:
    """One model that drafts, with its parameters and pools on the mesh."""

    def __init__(self, programs: DraftPrograms, params: Any):
        self.programs, self._params = programs, params
        self.name = programs.plan.name
        self._borrowed = set(programs.plan.model.borrowed)
        shapes = programs.pools()
        zeros = jax.jit(
            lambda: tuple(jnp.zeros(s.shape, s.dtype) for s in shapes), out_shardings=tuple(s.sharding for s in shapes)
        )
        self.pools = zeros()
        wanted = programs.plan.model.aux_layers
        self._aux = [programs.aux_layers.index(layers) for layers in wanted]

    def follow(
        self,
        bucket: Bucket,
        state: DeviceState,
        packed: Any,
        hidden: jax.Array,
        extras: tuple[jax.Array, tuple[jax.Array, ...]],
        sampled: Sampled | Verified,
        requests: list[Request | None] | None,
    ) -> Drafted | None:
        """Enters a step of the target into the KV; drafts for `requests` (of whole shards, those wanted first)."""
        tokens, aux = extras
        new = (sampled.tokens, sampled.num_tokens) if isinstance(sampled, Verified) else (sampled.token,)
        table = state.tables[self.programs.plan.group]
        own_aux = tuple(aux[place] for place in self._aux)
        extend = self.programs.extend(bucket).run
        self.pools, start = extend(self._params, self.pools, table, packed, tokens, hidden, own_aux, new)
        if requests is None:
            return None
        chain = self.programs.chain(bucket.sequences).run
        self.pools, (drafts, chances) = chain(self._params, self.pools, table, start)
        drafts.copy_to_host_async()
        chances.copy_to_host_async()
        return Drafted(self.name, requests, drafts, chances)

    def memory(self) -> dict[str, int]:
        """Bytes of its own parameters and of its pools."""
        own = sum(leaf.nbytes for name, leaf in self._params.items() if name not in self._borrowed)
        return {f"drafter_{self.name}": own, f"kv_{self.name}": sum(pool.nbytes for pool in self.pools)}

    def close(self) -> None:
        """Drops its arrays."""
        for leaf in (*self.pools, *(leaf for name, leaf in self._params.items() if name not in self._borrowed)):
            leaf.delete()


def wanted_rows(plans: Sequence[Any], sequences: int) -> list[Request | None]:
    """The requests that chains are for, as `extend` orders them: on each shard those with lookahead first."""
    found: list[Request | None] = []
    for plan in plans:
        wanted = [row.request for row in plan.rows if row.lookahead] if plan is not None else []
        found += [*wanted, *[None] * (sequences - len(wanted))]
    return found

"""What stays on the device from step to step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from pallas_kernels.cpu_native import native
from pallas_kernels.cpu_native.memory import unwritten
from sharding.rules import VOCAB_AXES
from trillion_infer.cache.layout import PoolLayout
from trillion_infer.engine.ops import platform_of
from trillion_infer.layers.expert_cache import ExpertCache
from trillion_infer.layers.pools import Pool
from trillion_infer.sample import SamplerState

TABLE_CHUNK = 256
"""Changes of page tables that one call of the update program takes."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceState:
    """Donated to every step.

    pools: one a cache group, and the cache of experts where there is one. tables: `[data*slots, B]`, one a group.
    """

    pools: tuple[Any, ...]
    tables: tuple[Int[Array, "N B"], ...]
    sampler: SamplerState

    @property
    def kv_pools(self) -> tuple[Pool, ...]:
        """The pools of the cache groups."""
        return self.pools[: len(self.tables)]

    @property
    def expert_cache(self) -> ExpertCache | None:
        """None where experts lie on the devices."""
        last = self.pools[-1] if self.pools else None
        return last if isinstance(last, ExpertCache) else None

    @property
    def sampler_vocab(self) -> int:
        """Padded vocabulary."""
        return self.sampler.counts.shape[1]


@dataclass(frozen=True)
class StateShape:
    """Everything that fixes the shapes of a DeviceState.

    pages: pages of each pool a data shard. slots: running requests a data shard. blocks: page table width. experts: the
    abstract cache of experts, if there is one.
    """

    layouts: tuple[PoolLayout, ...]
    pages: tuple[int, ...]
    slots: int
    blocks: int
    vocab: int
    penalties: bool
    experts: ExpertCache | None = None

    def abstract(self, mesh: Mesh) -> DeviceState:
        """Shapes and shardings, without memory."""
        data = mesh.shape["data"]

        def of(spec: PartitionSpec, like: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=NamedSharding(mesh, spec))

        sampler = SamplerState.shapes(data * self.slots, self.vocab, penalties=self.penalties)
        table = jax.ShapeDtypeStruct((data * self.slots, self.blocks), jnp.int32)
        return DeviceState(
            pools=(
                *(layout.abstract(pages * data, mesh) for layout, pages in zip(self.layouts, self.pages, strict=True)),
                *(() if self.experts is None else (self.experts,)),  # pyright: ignore[reportArgumentType]
            ),
            tables=tuple(  # pyright: ignore[reportArgumentType]
                of(PartitionSpec("data"), table) for _ in self.layouts
            ),
            sampler=jax.tree.map(of, SamplerState.specs(VOCAB_AXES), sampler),
        )

    def allocate(self, mesh: Mesh, make_pools: Callable[[], tuple[Pool, ...]] | None = None) -> DeviceState:
        """The state, each device's shards made there, all zeros but the KV pools (`MakePools`), which `make_pools`
        makes if it is there already compiled."""
        abstract = self.abstract(mesh)
        if make_pools is None:
            make = MakePools(abstract.kv_pools, mesh)
            make_pools = jax.jit(make, out_shardings=make.shardings)
        pools = make_pools()
        rest = (abstract.pools[len(pools) :], abstract.tables, abstract.sampler)
        if all(leaf.sharding.is_fully_addressable for leaf in jax.tree.leaves(rest)):
            held, tables, sampler = jax.tree.map(_placed_zeros, rest)
        else:
            held, tables, sampler = jax.jit(lambda: jax.tree.map(_zeros, rest), out_shardings=_placed(rest))()
        return DeviceState((*pools, *held), tables, sampler)


@dataclass(frozen=True)
class MakePools:
    """A program without arguments that makes the KV pools `like` these: zeros, but where native kernels read them they
    stay unwritten, so that a page takes memory when it is first used."""

    like: tuple[Pool, ...]
    mesh: Mesh

    @property
    def shardings(self) -> Any:
        return _placed(self.like)

    def __call__(self) -> tuple[Pool, ...]:
        unused = self.mesh.size == 1 and platform_of(self.mesh) == "cpu" and native().isas
        return jax.tree.map(unwritten if unused else _zeros, self.like)


def _placed(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def _zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros(leaf.shape, leaf.dtype)


def _placed_zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding)


def specs_of(arrays: Any) -> Any:
    """How each leaf is split; the parts of a quantised weight or pool have different axes."""
    return jax.tree.map(lambda leaf: leaf.sharding.spec, arrays)


def update_tables(tables: tuple[Int[Array, "N B"], ...], updates: Int[Array, "n 4"]) -> tuple[Int[Array, "N B"], ...]:
    """Writes (group, row, block, page) entries; a negative group is padding."""
    written = []
    for group, table in enumerate(tables):
        rows = jnp.where(updates[:, 0] == group, updates[:, 1], table.shape[0])
        written.append(table.at[rows, updates[:, 2]].set(updates[:, 3], mode="drop"))
    return tuple(written)


def table_chunks(updates: list[tuple[int, int, int, int]]) -> list[np.ndarray]:
    """The updates as arrays of the fixed size `update_tables` takes."""
    chunks = []
    for start in range(0, len(updates), TABLE_CHUNK):
        part = updates[start : start + TABLE_CHUNK]
        chunk = np.full((TABLE_CHUNK, 4), -1, np.int32)
        chunk[: len(part)] = part
        chunks.append(chunk)
    return chunks

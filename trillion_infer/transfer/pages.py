"""KV pages out of one mesh's pools and into another's, whatever their tensor sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from sharding.heads import HeadPlan
from trillion_infer.cache.layout import PoolLayout
from trillion_infer.core.errors import ConfigError
from trillion_infer.layers.pools import Pool, QuantisedPool

PAGES_PER_CALL = 16
"""Pages one call moves: the only shape there is, so nothing is compiled for a page count."""


@dataclass(frozen=True)
class HeadMap:
    """Physical KV heads of a pool by logical head, and the logical head that each physical one holds (-1: padding)."""

    first: tuple[int, ...]
    holds: tuple[int, ...]


def head_map(plan: HeadPlan) -> HeadMap:
    """The placement of HeadPlan.place_keys."""
    logical = np.repeat(np.arange(plan.padded_kv_heads), plan.replicas)
    holds = tuple(int(h) if h < plan.kv_heads else -1 for h in logical)
    return HeadMap(tuple(h * plan.replicas for h in range(plan.kv_heads)), holds)


SCALE_BYTES = 4


def extract(pool: Pool, pages: Int[Array, "n"], heads: HeadMap | None) -> Array:
    """Pages of every layer, by logical head: `[L, n, p, K, 2, D]`, or `[L, n, p, R]` of a latent pool.

    Of a quantised pool: bytes, each vector's numbers and then its scale (of a latent entry: scales) in float32.
    """
    if not isinstance(pool, QuantisedPool):
        return _extract(pool, pages, heads)
    values = _bytes_of(_extract(pool.values, pages, heads))
    scales = jnp.take(pool.scales, pages, axis=1, mode="clip").swapaxes(2, 3)
    if heads is not None:
        scales = scales.reshape(*scales.shape[:3], len(heads.holds), 2, 1)[:, :, :, jnp.asarray(heads.first)]
    return jnp.concatenate((values, _bytes_of(scales)), axis=-1)


def insert(pool: Pool, pages: Int[Array, "n"], data: Array, heads: HeadMap | None) -> Pool:
    """The pool with `data` (see `extract`) in these pages; ids at and past the pool's end are padding."""
    if not isinstance(pool, QuantisedPool):
        return _insert(pool, pages, data, heads)
    width = pool.values.shape[-1]
    values = lax.bitcast_convert_type(data[..., :width], pool.values.dtype)
    scales = lax.bitcast_convert_type(data[..., width:].reshape(*data.shape[:-1], -1, SCALE_BYTES), jnp.float32)
    if heads is not None:
        scales = _by_physical_head(scales, heads).reshape(*scales.shape[:3], -1)
    new = pool.scales.at[:, pages].set(scales.swapaxes(2, 3), mode="drop")
    return QuantisedPool(_insert(pool.values, pages, values, heads), new)


def _bytes_of(x: Array) -> Array:
    """The bytes of the elements along the last axis."""
    out = lax.bitcast_convert_type(x, jnp.uint8)
    return out if out.ndim == x.ndim else out.reshape(*x.shape[:-1], -1)


def _extract(pool: Array, pages: Int[Array, "n"], heads: HeadMap | None) -> Array:
    taken = jnp.take(pool, pages, axis=1, mode="clip")
    if heads is None:
        return taken
    layers, count, size, dim = *taken.shape[:3], taken.shape[-1]
    return taken.reshape(layers, count, size, len(heads.holds), 2, dim)[:, :, :, jnp.asarray(heads.first)]


def _insert(pool: Array, pages: Int[Array, "n"], data: Array, heads: HeadMap | None) -> Array:
    if heads is not None:
        data = _by_physical_head(data, heads)
        data = data.reshape(data.shape[0], data.shape[1], *pool.shape[2:])
    return pool.at[:, pages].set(data.astype(pool.dtype), mode="drop")


def _by_physical_head(data: Array, heads: HeadMap) -> Array:
    """`[L, n, p, K, 2, …]` with a head for each physical one; zeros where it holds none."""
    places = jnp.asarray([max(h, 0) for h in heads.holds])
    real = jnp.asarray([h >= 0 for h in heads.holds])
    return jnp.where(real[:, None, None], data[:, :, :, places], jnp.zeros((), data.dtype))


class PageMover:
    """Moves pages between the pools of two engines of one model in one process, device to device.

    Refuses, with both sides named, layouts that cannot be moved into each other.
    """

    def __init__(
        self,
        source: tuple[Mesh, Sequence[PoolLayout], Sequence[HeadPlan | None]],
        target: tuple[Mesh, Sequence[PoolLayout], Sequence[HeadPlan | None]],
    ):
        (self._source_mesh, sources, source_plans), (self._target_mesh, targets, target_plans) = source, target
        for ours, theirs in zip(sources, targets, strict=True):
            if (ours.key, ours.layers, ours.page_size) != (theirs.key, theirs.layers, theirs.page_size):
                raise ConfigError(
                    f"KV of the prefill pool ({ours.key.name}, {ours.layers} layers, pages of {ours.page_size}) cannot "
                    f"be moved into the decode pool's ({theirs.key.name}, {theirs.layers} layers, pages of "
                    f"{theirs.page_size})."
                )
        self._out = [page_program(extract, self._source_mesh, plan) for plan in source_plans]
        self._into = [
            page_program(insert, self._target_mesh, plan, layout.pool_spec)
            for plan, layout in zip(target_plans, targets, strict=True)
        ]
        self._target = NamedSharding(self._target_mesh, P())
        self.bytes_moved = 0

    def take(self, pools: Sequence[Pool], pages: Sequence[Sequence[int]]) -> list[list[tuple[int, Any]]]:
        """Starts reading pages of each pool; returns, for each pool, (count, data on the way to the target) blocks.

        Reads in the order of the device's steps: what a page holds when this is called.
        """
        moved = []
        for group, (pool, ids) in enumerate(zip(pools, pages, strict=True)):
            blocks = []
            for start in range(0, len(ids), PAGES_PER_CALL):
                part = ids[start : start + PAGES_PER_CALL]
                data = self._out[group](pool, padded_ids(part, 0))
                blocks.append((len(part), jax.device_put(data, self._target)))
                self.bytes_moved += data.nbytes
            moved.append(blocks)
        return moved

    def put(
        self, pools: Sequence[Pool], pages: Sequence[Sequence[int]], moved: Sequence[Sequence[tuple[int, Any]]]
    ) -> tuple[Pool, ...]:
        """The target's pools with the blocks in `pages`, in the order in which they were taken; donates the pools.

        Blocks may have been taken for another target; they move once more then.
        """
        filled = []
        for group, (pool, ids, blocks) in enumerate(zip(pools, pages, moved, strict=True)):
            start = 0
            for count, data in blocks:
                data = jax.device_put(data, self._target)
                pool = self._into[group](pool, padded_ids(ids[start : start + count], pool.shape[1]), data)
                start += count
            filled.append(pool)
        return tuple(filled)


def page_program(fn: Any, mesh: Mesh, plan: HeadPlan | None, out: Any = None) -> Any:
    """`extract` or `insert` compiled for a pool of one mesh; with `out`, the spec of the pool, which is donated."""
    heads = None if plan is None else head_map(plan)
    sharding = jax.tree.map(lambda spec: NamedSharding(mesh, spec), P() if out is None else out)
    donate = (0,) if out is not None else ()
    return jax.jit(lambda *args: fn(*args, heads), out_shardings=sharding, donate_argnums=donate)


def padded_ids(ids: Sequence[int], filler: int) -> np.ndarray:
    """At most PAGES_PER_CALL page ids, filled up."""
    out = np.full(PAGES_PER_CALL, filler, np.int32)
    out[: len(ids)] = ids
    return out

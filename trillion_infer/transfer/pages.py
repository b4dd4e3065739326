"""KV pages out of one mesh's pools and into another's, whatever their tensor sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from pallas_kernels.cpu_native import native
from pallas_kernels.cpu_native.pages import read_pages, write_pages
from sharding.heads import HeadPlan
from trillion_infer.cache.layout import PoolLayout
from trillion_infer.cache.parts import LayerParts
from trillion_infer.core.errors import ConfigError
from trillion_infer.layers.pools import Pool, QuantisedPool
from trillion_infer.transfer.convert import SCALE_BYTES, VectorFormat, bytes_of, convert

PAGES_PER_CALL = 16
"""Pages one call moves: the only shape there is, so nothing is compiled for a page count."""


@dataclass(frozen=True)
class HeadMap:
    """Physical KV heads of a pool by logical head, and the logical head that each physical one holds (-1: padding)."""

    first: tuple[int, ...]
    holds: tuple[int, ...]

    @property
    def is_plain(self) -> bool:
        """Every head once and no padding: the physical heads are the logical ones."""
        return self.first == self.holds


def head_map(plan: HeadPlan) -> HeadMap:
    """The placement of HeadPlan.place_keys."""
    logical = np.repeat(np.arange(plan.padded_kv_heads), plan.replicas)
    holds = tuple(int(h) if h < plan.kv_heads else -1 for h in logical)
    return HeadMap(tuple(h * plan.replicas for h in range(plan.kv_heads)), holds)


@dataclass(frozen=True)
class PoolView:
    """How the pages of a mesh's pool are read and written.

    heads: None for a latent pool. way: native where one CPU device holds the pool; scatter where data shards split the
    pages; else slices, which on a CPU take a quarter of the time of a scatter.
    """

    heads: HeadMap | None
    way: str

    def read(self, pool: Array, pages: Int[Array, "n"]) -> Array:
        """`pool[:, pages]`; ids past its end read something."""
        return read_pages(pool, pages) if self.way == "native" else jnp.take(pool, pages, axis=1, mode="clip")

    def write(self, pool: Array, pages: Int[Array, "n"], data: Array, first: Int[Array, ""] | None = None) -> Array:
        """The pool with `data[:, i]` in page `pages[i]`, in place where donated; ids past its end write nothing.

        first: the layer of `data[0]`, where the data is of some layers only.
        """
        if self.way == "native":
            return write_pages(pool, pages, data, 0 if first is None else first)
        if self.way == "scatter":
            layers = slice(None) if first is None else (first + jnp.arange(data.shape[0]))[:, None]
            return pool.at[layers, pages].set(data, mode="drop")
        shape = (data.shape[0], 1, *pool.shape[2:])
        for i in range(data.shape[1]):
            page = jnp.minimum(pages[i], pool.shape[1] - 1)
            place = (jnp.int32(0) if first is None else first, page, *(jnp.int32(0) for _ in shape[2:]))
            new = jnp.where(pages[i] < pool.shape[1], data[:, i : i + 1], lax.dynamic_slice(pool, place, shape))
            pool = lax.dynamic_update_slice(pool, new, place)
        return pool


def view_of(mesh: Mesh, plan: HeadPlan | None) -> PoolView:
    """The view of a mesh's pool whose heads are placed by `plan`."""
    alone = mesh.devices.size == 1 and mesh.devices.flat[0].platform == "cpu" and bool(native().isas)
    return PoolView(
        None if plan is None else head_map(plan),
        "native" if alone else "scatter" if mesh.shape["data"] > 1 else "slices",
    )


def extract(pool: Pool, pages: Int[Array, "n"], view: PoolView) -> Array:
    """Pages of every layer, by logical head: `[L, n, p, K, 2, D]`, or `[L, n, p, R]` of a latent pool.

    Of a quantised pool: bytes, each vector's numbers and then its scale (of a latent entry: scales) in float32.
    """
    heads = view.heads
    if not isinstance(pool, QuantisedPool):
        return _extract(pool, pages, view)
    values = bytes_of(_extract(pool.values, pages, view))
    scales = view.read(pool.scales, pages).swapaxes(2, 3)
    if heads is not None:
        scales = scales.reshape(*scales.shape[:3], len(heads.holds), 2, 1)
        scales = scales if heads.is_plain else scales[:, :, :, jnp.asarray(heads.first)]
    return jnp.concatenate((values, bytes_of(scales)), axis=-1)


def insert(pool: Pool, pages: Int[Array, "n"], data: Array, view: PoolView) -> Pool:
    """The pool with `data` (see `extract`) in these pages; ids at and past the pool's end are padding."""
    return _put(pool, pages, data, None, view)


def insert_layers(pool: Pool, pages: Int[Array, "n"], data: Array, first: Int[Array, ""], view: PoolView) -> Pool:
    """The same with data of some layers, of which `first` is the first."""
    return _put(pool, pages, data, first, view)


def _put(pool: Pool, pages: Int[Array, "n"], data: Array, first: Int[Array, ""] | None, view: PoolView) -> Pool:
    if not isinstance(pool, QuantisedPool):
        return _insert(pool, pages, data, first, view)
    width = pool.values.shape[-1]
    values = lax.bitcast_convert_type(data[..., :width], pool.values.dtype)
    scales = lax.bitcast_convert_type(data[..., width:].reshape(*data.shape[:-1], -1, SCALE_BYTES), jnp.float32)
    if view.heads is not None:
        scales = _by_physical_head(scales, view.heads).reshape(*scales.shape[:3], -1)
    scales = view.write(pool.scales, pages, scales.swapaxes(2, 3), first)
    return QuantisedPool(_insert(pool.values, pages, values, first, view), scales)


def _extract_as(
    pool: Pool, pages: Int[Array, "n"], view: PoolView, formats: tuple[VectorFormat, VectorFormat]
) -> Array:
    return convert(extract(pool, pages, view), *formats)


def _extract(pool: Array, pages: Int[Array, "n"], view: PoolView) -> Array:
    taken, heads = view.read(pool, pages), view.heads
    if heads is None:
        return taken
    layers, count, size, dim = *taken.shape[:3], taken.shape[-1]
    physical = taken.reshape(layers, count, size, len(heads.holds), 2, dim)
    return physical if heads.is_plain else physical[:, :, :, jnp.asarray(heads.first)]


def _insert(pool: Array, pages: Int[Array, "n"], data: Array, first: Int[Array, ""] | None, view: PoolView) -> Array:
    if view.heads is not None:
        data = _by_physical_head(data, view.heads)
        data = data.reshape(data.shape[0], data.shape[1], *pool.shape[2:])
    return view.write(pool, pages, data.astype(pool.dtype), first)


def _by_physical_head(data: Array, heads: HeadMap) -> Array:
    """`[L, n, p, K, 2, …]` with a head for each physical one; zeros where it holds none."""
    if heads.is_plain:
        return data
    places = jnp.asarray([max(h, 0) for h in heads.holds])
    real = jnp.asarray([h >= 0 for h in heads.holds])
    return jnp.where(real[:, None, None], data[:, :, :, places], jnp.zeros((), data.dtype))


@dataclass(frozen=True)
class PoolSide:
    """What is to be known of an engine's pools, to move their pages.

    names: of the pools, those of a model that drafts with a fingerprint of it. formats: of the vectors of each.
    groups: the cache group whose pages each has. parts: in which blocks are stored.
    """

    mesh: Mesh
    names: tuple[str, ...]
    layouts: tuple[PoolLayout, ...]
    plans: tuple[HeadPlan | None, ...]
    formats: tuple[VectorFormat, ...]
    groups: tuple[int, ...]
    parts: LayerParts


class PageMover:
    """Moves pages between the pools of two engines of one model in one process, device to device.

    Tensor sizes may differ, and KV dtypes: pages are converted before they leave. Refuses, with both sides named,
    layouts that cannot be moved into each other. `groups`: see PoolSide; pools are named by their number in it.
    """

    def __init__(self, source: PoolSide, target: PoolSide):
        self.groups = source.groups
        for ours, theirs in zip(source.layouts, target.layouts, strict=True):
            if (ours.key, ours.layers, ours.page_size) != (theirs.key, theirs.layers, theirs.page_size):
                raise ConfigError(
                    f"KV of the prefill pool ({ours.key.name}, {ours.layers} layers, pages of {ours.page_size}) cannot "
                    f"be moved into the decode pool's ({theirs.key.name}, {theirs.layers} layers, pages of "
                    f"{theirs.page_size})."
                )
        formats = zip(source.formats, target.formats, strict=True)
        self._out = [
            page_program(partial(_extract_as, formats=pair), source.mesh, plan)
            for pair, plan in zip(formats, source.plans, strict=True)
        ]
        self._into = [
            page_program(insert, target.mesh, plan, layout.pool_spec)
            for plan, layout in zip(target.plans, target.layouts, strict=True)
        ]
        self._target = NamedSharding(target.mesh, P())
        meshes = source.mesh, target.mesh
        self.is_shared = all(device.platform == "cpu" for mesh in meshes for device in mesh.devices.flat)
        """Both meshes read the same memory, so that what has been read needs no copy to be there."""

    def take(self, number: int, pool: Pool, pages: Sequence[int]) -> Array:
        """Starts reading at most PAGES_PER_CALL pages, as the steps sent so far leave them."""
        return self._out[number](pool, padded_ids(pages, 0))

    def send(self, read: Array) -> Array:
        """What `take` reads, on its way to the target's mesh. Waits for the reading where `is_shared`."""
        return jax.device_put(np.asarray(read) if self.is_shared else read, self._target)

    def put(self, number: int, pool: Pool, pages: Sequence[int], data: Array) -> Pool:
        """The target's pool with what was sent in `pages`; ids at its end are left out. Donates the pool."""
        return self._into[number](pool, padded_ids(pages, pool.shape[1]), data)

    def warm_up(self, sources: Sequence[Pool], targets: Sequence[Pool]) -> tuple[Pool, ...]:
        """Compiles what there is, so that no request waits for it; the target's pools."""
        return tuple(
            self.put(number, target, [], self.send(self.take(number, source, [])))
            for number, (source, target) in enumerate(zip(sources, targets, strict=True))
        )


def page_program(fn: Any, mesh: Mesh, plan: HeadPlan | None, out: Any = None) -> Any:
    """`extract`, `insert` or `insert_layers` compiled for a pool of one mesh; with `out`, the spec of the pool, which
    is donated."""
    view = view_of(mesh, plan)
    sharding = jax.tree.map(lambda spec: NamedSharding(mesh, spec), P() if out is None else out)
    donate = (0,) if out is not None else ()
    return jax.jit(lambda *args: fn(*args, view), out_shardings=sharding, donate_argnums=donate)


def padded_ids(ids: Sequence[int], filler: int, size: int = PAGES_PER_CALL) -> np.ndarray:
    """At most `size` page ids, filled up."""
    out = np.full(size, filler, np.int32)
    out[: len(ids)] = ids
    return out

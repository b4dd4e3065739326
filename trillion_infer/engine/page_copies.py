"""Pages of the pools as host bytes and back: what the tiers store."""

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array

from sharding.heads import HeadPlan
from trillion_infer.cache.layout import PoolLayout
from trillion_infer.cache.tiers.base import Tier, group_of, unit_of
from trillion_infer.cache.tiers.make import make_tiers
from trillion_infer.config.engine import EngineConfig
from trillion_infer.layers.pools import Pool
from trillion_infer.transfer.convert import SCALE_BYTES
from trillion_infer.transfer.pages import (
    PAGES_PER_CALL,
    PoolSide,
    extract,
    insert,
    insert_layers,
    padded_ids,
    page_program,
)

Pools = tuple[Pool, ...]


class PageCopier:
    """Pages of the pools as host bytes and back, by logical head: the same bytes whatever the mesh.

    A block of a cache group holds the page of each pool that has the group's pages, those of models that draft behind
    the target's own; or it lies in several parts (`side.parts`), each the page's bytes of some layers of the one pool.
    Pools go by their number in the side, which is their place in `Engine.all_pools`.
    """

    def __init__(self, side: PoolSide):
        layouts, both = side.layouts, list(zip(side.layouts, side.plans, strict=True))
        self._out = [page_program(extract, side.mesh, plan) for plan in side.plans]
        self._into = [page_program(insert, side.mesh, plan, layout.pool_spec) for layout, plan in both]
        self._layers_into = [page_program(insert_layers, side.mesh, plan, layout.pool_spec) for layout, plan in both]
        self._shapes = [_block_shape(layout, plan) for layout, plan in both]
        self._dtypes = [np.dtype(np.uint8 if lay.quantised else jax.numpy.dtype(lay.dtype)) for lay in layouts]
        self._names = [layout.dtype for layout in layouts]
        self.parts = side.parts
        self.num_groups = max(side.groups) + 1
        self._drafters = side.names[self.num_groups :]
        self._pools = [[n for n, own in enumerate(side.groups) if own == group] for group in range(self.num_groups)]
        self.units = [[unit_of(group, part) for part in self.parts.of(group)] for group in range(self.num_groups)]
        """Of a block of each cache group, in the order of layers."""
        self.pages_per_part_call = 2 * PAGES_PER_CALL
        """Pages that one call writes of a part."""

    def open_tiers(self, config: EngineConfig, fingerprint: bytes) -> list[Tier]:
        """The tiers that `config` asks for, for blocks of these pools. Raises what `make_tiers` raises."""
        shapes = repr(list(zip(self._shapes, self._names, strict=True)))
        layout = shapes + repr(self.parts.layers) + "".join(self._drafters)
        sizes = [[self.unit_bytes(unit) for unit in units] for units in self.units]
        return make_tiers(config.host_kv, config.disk_kv, config.store, fingerprint, layout, sizes)

    def unit_bytes(self, unit: int) -> int:
        """Bytes of a part of one page of a group, replicas and padding of heads left out."""
        group, layers = group_of(unit), self._layers(unit)
        if layers is None:
            return sum(self._layer_bytes(number) * self._shapes[number][0] for number in self._pools[group])
        return (layers[1] - layers[0]) * self._layer_bytes(group)

    def _layers(self, unit: int) -> tuple[int, int] | None:
        """The layers that a part has of its group's one pool; None where it is all of them, in every pool."""
        group = group_of(unit)
        return None if len(self.units[group]) == 1 else self.parts.of(group)[unit - unit_of(group, 0)]

    def _layer_bytes(self, number: int) -> int:
        return int(np.prod(self._shapes[number][1:])) * self._dtypes[number].itemsize

    def read(self, pools: Pools, group: int, pages: Sequence[int]) -> list[Array]:
        """Starts copying at most PAGES_PER_CALL pages of a group to the host, as the steps sent so far leave them."""
        found = [self._out[number](pools[number], padded_ids(pages, 0)) for number in self._pools[group]]
        for data in found:
            data.copy_to_host_async()
        return found

    def to_bytes(self, data: Sequence[Array], group: int, count: int) -> list[bytes]:
        """The bytes of each unit of the first page that was read, then of the others, `count` in all."""
        hosts = [np.asarray(part) for part in data]
        layers = [slice(*(self._layers(unit) or (None,))) for unit in self.units[group]]
        return [b"".join([host[run, i].tobytes() for host in hosts]) for i in range(count) for run in layers]

    def write(self, pools: Pools, group: int, pages: Sequence[int], blocks: Sequence[Sequence[bytes]]) -> Pools:
        """The pools with at most PAGES_PER_CALL blocks of a group, the units of each, in `pages`; donates the
        group's."""
        written, start = list(pools), 0
        for number in self._pools[group]:
            data = np.zeros((self._shapes[number][0], PAGES_PER_CALL, *self._shapes[number][1:]), self._dtypes[number])
            size = self._layer_bytes(number) * len(data)
            for i, block in enumerate(blocks):
                for unit, content in zip(self.units[group], block, strict=True):
                    self._fill(data[slice(*(self._layers(unit) or (None,))), i], content, start)
            start += size
            ids = padded_ids(pages, written[number].shape[1])
            written[number] = self._into[number](written[number], ids, data)
        return tuple(written)

    def write_part(self, pools: Pools, unit: int, pages: Sequence[int], contents: Sequence[bytes]) -> Pools:
        """The pools with a part of at most `pages_per_part_call` blocks in `pages`; donates the group's."""
        number, count = group_of(unit), self.pages_per_part_call
        first, stop = self._layers(unit) or (0, self._shapes[number][0])
        data = np.zeros((stop - first, count, *self._shapes[number][1:]), self._dtypes[number])
        for i, content in enumerate(contents):
            self._fill(data[:, i], content, 0)
        ids = padded_ids(pages, pools[number].shape[1], count)
        written = self._layers_into[number](pools[number], ids, data, np.int32(first))
        return (*pools[:number], written, *pools[number + 1 :])

    @staticmethod
    def _fill(place: np.ndarray, content: bytes, start: int) -> None:
        place[...] = np.frombuffer(content, place.dtype, place.size, start).reshape(place.shape)

    def warm_up(self, pools: Pools, by_parts: bool) -> Pools:
        """Compiles what there is, so that no step waits for it. by_parts: pages are written by parts, too."""
        for group in range(self.num_groups):
            self.read(pools, group, [])
            pools = self.write(pools, group, [], [])
            for unit in self.units[group] if by_parts else ():
                pools = self.write_part(pools, unit, [], [])
        return pools


def _block_shape(layout: PoolLayout, plan: HeadPlan | None) -> tuple[int, ...]:
    """Of a page as `extract` gives it, its layers first."""
    scales = SCALE_BYTES if layout.quantised else 0
    if plan is None:
        return (layout.layers, layout.page_size, layout.dim + layout.scale_rows * scales)
    return (layout.layers, layout.page_size, plan.kv_heads, 2, layout.dim + scales)

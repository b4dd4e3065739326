"""The programs that read pages out of an engine's pools and put pages in, in the one form in which they travel."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, UInt

from trillion_infer.distributed.calls import row_sharding
from trillion_infer.distributed.joining import processes_of
from trillion_infer.engine.programs import ProgramSet, abstract
from trillion_infer.layers.pools import Pool
from trillion_infer.transfer.convert import SCALE_BYTES, VectorFormat, convert
from trillion_infer.transfer.handoff.identity import PoolSpec
from trillion_infer.transfer.pages import PAGES_PER_CALL, PoolSide, PoolView, extract, insert, view_of

PREFIX = "pages_"
"""What the names of these programs begin with."""

_MIX = (0x9E3779B1, 0x85EBCA77)
"""Odd multipliers of the two digest words (golden ratio; xxHash's second prime)."""


@dataclass
class PagePrograms(ProgramSet):
    """For each pool one program that reads 16 pages and digests them, and one a KV dtype that puts such in place.

    pools: arrays or their shapes. Where the mesh has devices of several processes, pages come in as the rows that
    `Recorder.share` makes: one process received them, and all need them.
    """

    side: PoolSide
    pools: Sequence[Any]

    def names(self) -> list[str]:
        """Those that pools of one dtype need; a program for pages of another dtype is made when such come."""
        both = enumerate(self.side.formats)
        return [name for number, form in both for name in (self.out(number), self.into(number, form.dtype))]

    def out(self, number: int) -> str:
        return f"{PREFIX}out_{number}"

    def into(self, number: int, dtype: str) -> str:
        return f"{PREFIX}in_{number}_{dtype}"

    @property
    def is_shared(self) -> bool:
        """Several processes run these programs together."""
        return len(processes_of(self.side.mesh)) > 1

    def build(self, name: str) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]:
        way, number, *dtype = name.removeprefix(PREFIX).split("_", 2)
        side, pool = self.side, int(number)
        view = view_of(side.mesh, side.plans[pool])
        whole = NamedSharding(side.mesh, P())
        known = jax.tree.map(lambda a: abstract(a.sharding, a.shape, a.dtype), self.pools[pool])
        ids = abstract(whole, (PAGES_PER_CALL,))
        if way == "out":
            return partial(_stage, view=view), (known, ids, abstract(whole, ())), ()
        spec = replace(self.specs()[pool], dtype=dtype[0])
        shape, kind = travelling(spec)
        fill = partial(
            _fill,
            view=view,
            formats=(replace(side.formats[pool], dtype=dtype[0]), side.formats[pool]),
            has_rows=self.is_shared,
        )
        at, rows = (row_sharding(side.mesh), (side.mesh.size,)) if self.is_shared else (whole, ())
        return fill, (known, ids, abstract(at, (*rows, *shape), kind)), (0,)

    def specs(self) -> tuple[PoolSpec, ...]:
        """The pools as a handshake tells them."""
        found = []
        for name, layout, plan in zip(self.side.names, self.side.layouts, self.side.plans, strict=True):
            middle = (layout.dim,) if plan is None else (plan.kv_heads, 2, layout.dim)
            found.append(PoolSpec(name, (layout.layers, layout.page_size, *middle), layout.dtype))
        return tuple(found)


def travelling(spec: PoolSpec) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype in which 16 pages of a pool travel."""
    layers, *middle, width = spec.shape
    dtype = jnp.dtype(spec.dtype)
    if spec.quantised:
        scales = 2 if len(spec.shape) == 3 else 1
        width, dtype = width + SCALE_BYTES * scales, jnp.dtype(jnp.uint8)
    return (layers, PAGES_PER_CALL, *middle, width), dtype


def checksum(data: Array) -> UInt[Array, "2"]:
    """Two 32-bit words over the bits of `data`: sums modulo 2^32 of each element times an odd number that its position
    gives. Any single change is found, any other with a chance of about 1 in 2^62."""
    width = data.dtype.itemsize * 8
    words = jax.lax.bitcast_convert_type(data, jnp.dtype(f"uint{width}")).astype(jnp.uint32).reshape(-1) + jnp.uint32(1)
    place = jax.lax.iota(jnp.uint32, words.size)
    odd = [(place * jnp.uint32(mix) ^ place >> jnp.uint32(15)) | jnp.uint32(1) for mix in _MIX]
    return jnp.stack([jnp.sum(words * weight, dtype=jnp.uint32) for weight in odd])


def digest_bytes(words: Array) -> bytes:
    return np.asarray(words).astype("<u4").tobytes()


def _stage(pool: Pool, pages: Int[Array, "n"], count: Int[Array, ""], view: PoolView) -> tuple[Array, UInt[Array, "2"]]:
    """The first `count` of these pages, zeros after them, and the checksum of all."""
    data = extract(pool, pages, view)
    real = jnp.arange(PAGES_PER_CALL) < count
    data = jnp.where(real.reshape(-1, *[1] * (data.ndim - 2)), data, jnp.zeros((), data.dtype))
    return data, checksum(data)


def _fill(
    pool: Pool,
    pages: Int[Array, "n"],
    data: Array,
    view: PoolView,
    formats: tuple[VectorFormat, VectorFormat],
    has_rows: bool,
) -> Pool:
    if has_rows:
        data = jnp.sum(data, axis=0, dtype=data.dtype)
    return insert(pool, pages, convert(data, *formats), view)

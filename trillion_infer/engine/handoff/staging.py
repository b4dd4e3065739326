"""Pages out of an engine's pools and into them, in the one form in which they travel, with digests made on the device.

What travels is `[L, 16, p, K, 2, D]` (or `[L, 16, p, R]`) on one device, by logical head: the source's program gathers
it from its mesh, and the destination's spreads it over its own, so tensor sizes may differ. Of an eight-bit pool the
vectors travel as bytes with their scales behind them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, UInt

from trillion_infer.layers.pools import Pool
from trillion_infer.transfer.convert import SCALE_BYTES, VectorFormat, convert
from trillion_infer.transfer.handoff.identity import PoolSpec
from trillion_infer.transfer.pages import (
    PAGES_PER_CALL,
    PoolSide,
    PoolView,
    extract,
    insert,
    padded_ids,
    page_program,
)

_MIX = (0x9E3779B1, 0x85EBCA77)
"""Odd multipliers of the two digest words (golden ratio; xxHash's second prime)."""


def checksum(data: Array) -> UInt[Array, "2"]:
    """Two 32-bit words over the bits of `data`: sums modulo 2^32 of each element times an odd number that its position
    gives. Any single change is found, any other with a chance of about 1 in 2^62."""
    width = data.dtype.itemsize * 8
    words = jax.lax.bitcast_convert_type(data, jnp.dtype(f"uint{width}")).astype(jnp.uint32).reshape(-1) + jnp.uint32(1)
    place = jax.lax.iota(jnp.uint32, words.size)
    odd = [(place * jnp.uint32(mix) ^ place >> jnp.uint32(15)) | jnp.uint32(1) for mix in _MIX]
    return jnp.stack([jnp.sum(words * weight, dtype=jnp.uint32) for weight in odd])


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
) -> Pool:
    return insert(pool, pages, convert(data, *formats), view)


@dataclass(frozen=True)
class Staged:
    """Pages on their way out: an array on one device, and its digest, both perhaps still being computed."""

    data: Array
    digest: Array

    @property
    def is_ready(self) -> bool:
        return self.digest.is_ready()  # pyright: ignore[reportAttributeAccessIssue]

    def digest_bytes(self) -> bytes:
        return digest_bytes(self.digest)


def digest_bytes(words: Array) -> bytes:
    return np.asarray(words).astype("<u4").tobytes()


class PageStager:
    """For one engine's pools. Programs are compiled by `warm_up`, for 16 pages; nothing is compiled for a count. Pages
    of another KV dtype are converted where they arrive; that program is compiled when a peer first sends such.

    Pools go by their number in `groups`, which says whose pages each has.
    """

    def __init__(self, side: PoolSide):
        self._side, self.groups = side, side.groups
        self._everywhere = NamedSharding(side.mesh, P())
        self._one = SingleDeviceSharding(side.mesh.devices.flat[0])
        self._out = [page_program(_stage, side.mesh, plan) for plan in side.plans]
        self._into: dict[tuple[int, str], Any] = {}
        self._checksum = jax.jit(checksum)

    def _filling(self, number: int, dtype: str) -> Any:
        """The program that puts pages of this dtype in place."""
        if (number, dtype) not in self._into:
            side, own = self._side, self._side.formats[number]
            fill = partial(_fill, formats=(replace(own, dtype=dtype), own))
            spec = side.layouts[number].pool_spec
            self._into[number, dtype] = page_program(fill, side.mesh, side.plans[number], spec)
        return self._into[number, dtype]

    def specs(self) -> tuple[PoolSpec, ...]:
        """The pools as a handshake tells them."""
        found = []
        for name, layout, plan in zip(self._side.names, self._side.layouts, self._side.plans, strict=True):
            middle = (layout.dim,) if plan is None else (plan.kv_heads, 2, layout.dim)
            found.append(PoolSpec(name, (layout.layers, layout.page_size, *middle), layout.dtype))
        return tuple(found)

    def arrival(self, spec: PoolSpec) -> jax.ShapeDtypeStruct:
        """What arrives from a pool that a peer has told of."""
        layers, *middle, width = spec.shape
        dtype = jnp.dtype(spec.dtype)
        if spec.quantised:
            scales = 2 if len(spec.shape) == 3 else 1
            width, dtype = width + SCALE_BYTES * scales, jnp.dtype(jnp.uint8)
        return jax.ShapeDtypeStruct((layers, PAGES_PER_CALL, *middle, width), dtype, sharding=self._one)

    def stage(self, pool: Pool, number: int, pages: Sequence[int]) -> Staged:
        """Starts reading at most 16 pages, as the steps sent so far leave them."""
        data, digest = self._out[number](pool, padded_ids(pages, 0), np.int32(len(pages)))
        return Staged(data.addressable_data(0), digest)

    def digest(self, data: Array) -> bytes:
        """The digest of what has arrived."""
        return digest_bytes(self._checksum(data))

    def fill(self, pool: Pool, number: int, pages: Sequence[int], data: Array, dtype: str) -> Pool:
        """The pool with these pages of `data`, of a pool of `dtype`; ids at the pool's end are left out. Donates it."""
        fill = self._filling(number, dtype)
        return fill(pool, padded_ids(pages, pool.shape[1]), jax.device_put(data, self._everywhere))

    def warm_up(self, pools: Sequence[Pool]) -> tuple[Pool, ...]:
        """Compiles what there is, so that no request waits for it."""
        filled = []
        for number, pool in enumerate(pools):
            staged = self.stage(pool, number, [])
            self.digest(staged.data)
            filled.append(self.fill(pool, number, [], staged.data, self._side.formats[number].dtype))
        return tuple(filled)

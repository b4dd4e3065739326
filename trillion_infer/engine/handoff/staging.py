"""Pages out of an engine's pools and into them, in the one form in which they travel, with digests made on the device.

What travels is `[L, 16, p, K, 2, D]` (or `[L, 16, p, R]`) on one device, by logical head: the source's program gathers
it from its mesh, and the destination's spreads it over its own, so tensor sizes may differ, and meshes may lie over
several processes. Of an eight-bit pool the vectors travel as bytes with their scales behind them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from trillion_infer.distributed.calls import Recorder, local_devices
from trillion_infer.engine.handoff.page_programs import PagePrograms, checksum, digest_bytes, travelling
from trillion_infer.layers.pools import Pool
from trillion_infer.transfer.handoff.identity import PoolSpec
from trillion_infer.transfer.pages import PoolSide, padded_ids


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


class PageStager:
    """For one engine's pools. Programs are compiled by `warm_up`, for 16 pages; nothing is compiled for a count. Pages
    of another KV dtype are converted where they arrive; that program is compiled when a peer first sends such.

    Pools go by their number in `groups`, which says whose pages each has. recorder: of the engine, where several
    processes run its programs.
    """

    def __init__(self, side: PoolSide, pools: Sequence[Pool], recorder: Recorder | None = None):
        self.groups = side.groups
        self._programs, self._recorder = PagePrograms(side, pools), recorder
        self._programs.recorder = recorder
        self._everywhere = NamedSharding(side.mesh, P())
        self._one = SingleDeviceSharding(local_devices(side.mesh)[0])
        self._formats = side.formats
        self._checksum = jax.jit(checksum)

    def specs(self) -> tuple[PoolSpec, ...]:
        """The pools as a handshake tells them."""
        return self._programs.specs()

    def arrival(self, spec: PoolSpec) -> jax.ShapeDtypeStruct:
        """What arrives from a pool that a peer has told of."""
        shape, dtype = travelling(spec)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._one)

    def stage(self, pool: Pool, number: int, pages: Sequence[int]) -> Staged:
        """Starts reading at most 16 pages, as the steps sent so far leave them."""
        out = self._programs.get(self._programs.out(number)).run
        data, digest = out(pool, padded_ids(pages, 0), np.int32(len(pages)))
        return Staged(data.addressable_data(0), digest)

    def digest(self, data: Array) -> bytes:
        """The digest of what has arrived."""
        return digest_bytes(self._checksum(data))

    def fill(self, pool: Pool, number: int, pages: Sequence[int], data: Array, dtype: str) -> Pool:
        """The pool with these pages of `data`, of a pool of `dtype`; ids at the pool's end are left out. Donates it."""
        fill = self._programs.get(self._programs.into(number, dtype)).run
        spread = jax.device_put(data, self._everywhere) if self._recorder is None else self._recorder.share(data)
        return fill(pool, padded_ids(pages, pool.shape[1]), spread)

    def warm_up(self, pools: Sequence[Pool]) -> tuple[Pool, ...]:
        """Compiles what there is, so that no request waits for it."""
        self._programs.compile_all()
        filled = []
        for number, pool in enumerate(pools):
            staged = self.stage(pool, number, [])
            self.digest(staged.data)
            filled.append(self.fill(pool, number, [], staged.data, self._formats[number].dtype))
        return tuple(filled)

"""Block sizes of the kernels: measured where there are any, else what on-chip memory was planned for."""

from dataclasses import asdict, dataclass

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.common.tuning import device_name, tuned

PACKAGE = "pallas_kernels.latent_paged_attention"
LANES, SUBLANES = 128, 8
VECTOR_LIMIT = 48 * 2**20
"""Bytes of a TPU core's vector memory that the kernel may take; the smallest chip has 64 MiB."""
SHARED_LIMIT = 200 * 1024
"""Bytes of a GPU block's shared memory to plan with; Hopper has 227 KiB."""


@dataclass(frozen=True)
class Shape:
    """What block sizes depend on, and what entries of tuning/*.json are keyed by, beside the device."""

    heads: int
    rank: int
    width: int  # of a row of the pool that is read: latent, rotary part and, on TPU, unused lanes
    page_size: int  # slots that the pool has of a page
    pool_dtype: str

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.pool_dtype).itemsize

    @property
    def dot_itemsize(self) -> int:
        """Bytes of an element as it is multiplied; 8-bit ones are widened."""
        return max(2, self.itemsize)

    def measured(self, platform: str) -> dict[str, int] | None:
        return tuned(PACKAGE, platform, {"device": device_name(), **asdict(self)})


@dataclass(frozen=True)
class TpuBlocks:
    """Rows (queries times heads) of a block of prefill, and pages of a chunk."""

    rows: int
    pages: int

    def queries(self, shape: Shape) -> int:
        """Queries of a block of prefill."""
        return max(1, self.rows // shape.heads)

    def vector_bytes(self, shape: Shape) -> int:
        """Vector memory that the kernel takes at most."""
        rows = -(-self.queries(shape) * shape.heads // SUBLANES) * SUBLANES
        keys = self.pages * shape.page_size
        chunks = 2 * keys * shape.width * shape.itemsize
        chunks += keys * shape.width * 4 * (shape.itemsize == 1)
        scales = 2 * self.pages * SUBLANES * -(-shape.page_size // LANES) * LANES * 4 * (shape.itemsize == 1)
        queries = 2 * rows * (shape.width * shape.dot_itemsize + (shape.rank + LANES) * 4)
        state = rows * (2 * LANES + shape.rank) * 4
        work = rows * (4 * keys + shape.rank) * 4
        return chunks + scales + queries + state + work + 4 * 2**20

    def refusal(self, shape: Shape) -> str | None:
        """Why these blocks do not fit, or None."""
        need = self.vector_bytes(shape)
        if need <= VECTOR_LIMIT:
            return None
        return f"{self} needs {need} bytes of vector memory, of which {VECTOR_LIMIT} may be used."


@dataclass(frozen=True)
class GpuBlocks:
    """Rows (queries times heads) of a program, keys of a step, warps and pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int

    def head_block(self, shape: Shape) -> int:
        """Heads of a program, a power of two."""
        return min(self.rows, pl.next_power_of_2(shape.heads))

    def shared_bytes(self, shape: Shape) -> int:
        """Shared memory that the kernel takes at most."""
        loaded = self.stages * self.keys * shape.width * shape.dot_itemsize
        return loaded + self.rows * (shape.width + self.keys) * shape.dot_itemsize

    def refusal(self, shape: Shape) -> str | None:
        """Why these blocks do not fit, or None."""
        need = self.shared_bytes(shape)
        if need <= SHARED_LIMIT:
            return None
        return f"{self} needs {need} bytes of shared memory, of which {SHARED_LIMIT} may be used."


def tpu_blocks(shape: Shape, table_width: int) -> TpuBlocks:
    """Measured blocks, else 512 rows by 512 keys, fewer rows while they do not fit.

    Args:
      table_width: blocks of the longest sequence.
    """
    measured = shape.measured("tpu")
    if measured:
        return TpuBlocks(**measured)
    blocks = TpuBlocks(512, max(1, min(table_width, 512 // shape.page_size)))
    while blocks.refusal(shape) and blocks.rows > shape.heads:
        blocks = TpuBlocks(blocks.rows // 2, blocks.pages)
    return blocks


def gpu_blocks(shape: Shape) -> GpuBlocks:
    """Measured blocks, else 64 rows by 32 keys, half of both where products are float32."""
    measured = shape.measured("gpu")
    if measured:
        return GpuBlocks(**measured)
    if shape.dot_itemsize == 4:
        return GpuBlocks(rows=32, keys=16, warps=8, stages=2)
    return GpuBlocks(rows=64, keys=32, warps=8, stages=2)

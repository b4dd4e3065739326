"""Block sizes of the kernels: measured where there are any, else the largest that on-chip memory holds."""

from dataclasses import asdict, dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.common.tuning import device_name, tuned

PACKAGE = "pallas_kernels.ragged_paged_attention"
LANES, SUBLANES = 128, 8
VECTOR_BUDGET, VECTOR_LIMIT = 40 * 2**20, 52 * 2**20
"""Bytes of a TPU core's vector memory: to plan with, and never to exceed. The smallest chip has 64 MiB."""
SHARED_BUDGET = 200 * 1024
"""Bytes of a GPU block's shared memory to plan with; Hopper has 227 KiB."""
HOPPER = ("h100", "h200")
"""Devices, by `device_name`, that Mosaic GPU's prefill is for."""


@dataclass(frozen=True)
class Shape:
    """What block sizes depend on, and what entries of tuning/*.json are keyed by, beside the device."""

    heads: int
    kv_heads: int
    dim: int  # lanes of a row of the pool
    page_size: int
    pool_dtype: str

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    def measured(self, platform: str) -> dict[str, Any] | None:
        return tuned(PACKAGE, platform, {"device": device_name(), **asdict(self)})


@dataclass(frozen=True)
class TpuBlocks:
    """Queries of a block and pages of a chunk."""

    block_q: int
    pages: int

    def vector_bytes(self, shape: Shape) -> int:
        """Vector memory that the kernel takes at most."""
        rows, keys = self.block_q * shape.group, self.pages * shape.page_size
        padded = -(-rows // SUBLANES) * SUBLANES
        itemsize = jnp.dtype(shape.pool_dtype).itemsize
        chunks = 2 * keys * 2 * shape.kv_heads * itemsize * shape.dim
        queries = shape.kv_heads * (4 * rows * shape.dim + padded * (3 * LANES + shape.dim)) * 4
        scales = 0
        if itemsize == 1:
            lanes = -(-shape.page_size // LANES) * LANES
            scales = 2 * self.pages * -(-2 * shape.kv_heads // SUBLANES) * SUBLANES * lanes * 4
        work = 7 * padded * keys * 4 + 6 * keys * shape.dim * 4
        return chunks + queries + scales + work + 4 * 2**20

    def refusal(self, shape: Shape) -> str | None:
        """Why these blocks do not fit, or None."""
        need = self.vector_bytes(shape)
        if need <= VECTOR_LIMIT:
            return None
        return f"{self} needs {need} bytes of vector memory, of which {VECTOR_LIMIT} may be used."


@dataclass(frozen=True)
class GpuBlocks:
    """Keys of a step, rows (queries times heads of a group) of a prefill program, its warps, and pipeline stages.

    `prefill` says which kernel attends queries of more than one token: "triton", or "mosaic" (`gpu_hopper_kernel.py`)
    whose rows and warps are fixed and whose stages are buffers of keys and of values.
    """

    keys: int
    rows: int
    warps: int
    stages: int
    prefill: str = "triton"

    def shared_bytes(self, shape: Shape) -> int:
        """Shared memory that the kernel takes at most."""
        dim = max(16, pl.next_power_of_2(shape.dim))
        itemsize = jnp.dtype(shape.pool_dtype).itemsize
        operand = max(2, itemsize)
        loaded = self.stages * 2 * self.keys * dim * operand
        if self.prefill == "mosaic":  # weights stay in registers; 4 KiB are for barriers and sums over warps
            return loaded + self.rows * dim * operand + 4096
        return loaded + self.rows * (dim + self.keys) * operand

    def refusal(self, shape: Shape) -> str | None:
        """Why these blocks do not fit, or None."""
        if self.prefill not in ("triton", "mosaic"):
            return f'{self} names a prefill kernel that is neither "triton" nor "mosaic".'
        if self.prefill == "mosaic" and (reason := self._mosaic_refusal(shape)):
            return reason
        need = self.shared_bytes(shape)
        if need <= SHARED_BUDGET:
            return None
        return f"{self} needs {need} bytes of shared memory, of which {SHARED_BUDGET} may be used."

    def _mosaic_refusal(self, shape: Shape) -> str | None:
        if shape.pool_dtype != "bfloat16":
            return f"Mosaic GPU's prefill multiplies bfloat16; the pool is {shape.pool_dtype}."
        if shape.dim not in (64, 128, 256):
            return f"Mosaic GPU's prefill takes head dims 64, 128 and 256; got {shape.dim}."
        if self.keys % 64 or (self.rows, self.warps) != (128, 8):
            return f"Mosaic GPU's prefill takes 128 rows, 8 warps and multiples of 64 keys; got {self}."
        if shape.page_size % 8 or (shape.page_size % self.keys and self.keys % shape.page_size):
            return (
                f"Mosaic GPU's prefill copies 8 slots at least, and pages that divide a step of {self.keys} keys or "
                f"are divided by it; pages have {shape.page_size} slots."
            )
        if shape.group > self.rows:
            return f"Mosaic GPU's prefill takes {self.rows} heads a KV head at most; got {shape.group}."
        return None


def tpu_blocks(shape: Shape, table_width: int, longest: int) -> TpuBlocks:
    """Measured blocks, else the largest up to 1024 keys and 128 queries that the budget holds.

    Args:
      table_width: blocks of the longest sequence. longest: most query tokens of a sequence.
    """
    measured = shape.measured("tpu")
    if measured:
        return TpuBlocks(**measured)
    pages, block_q = max(1, min(table_width, 1024 // shape.page_size)), min(128, longest)
    while TpuBlocks(block_q, pages).vector_bytes(shape) > VECTOR_BUDGET and (block_q > 16 or pages > 1):
        if block_q > 16 and (block_q * shape.group > pages * shape.page_size or pages == 1):
            block_q = max(16, block_q // 2)
        else:
            pages = max(1, pages // 2)
    return TpuBlocks(block_q, pages)


def gpu_blocks(shape: Shape) -> GpuBlocks:
    """Measured blocks, else `usual_gpu_blocks`."""
    measured = shape.measured("gpu")
    return GpuBlocks(**measured) if measured else usual_gpu_blocks(shape)


def usual_gpu_blocks(shape: Shape) -> GpuBlocks:
    """For Triton 64 keys by 128 rows, 32 by 32 where rows are long or dots are float32.

    Keys and values are read once a program of prefill, so its rows are what saves bandwidth; 8 warps hold 128 rows
    of 128 float32 sums in 64 registers a thread.
    """
    if shape.dim > 128 or shape.pool_dtype == "float32":
        return GpuBlocks(keys=32, rows=32, warps=4, stages=2)
    return GpuBlocks(keys=64, rows=128, warps=8, stages=2)

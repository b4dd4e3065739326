"""Bytes and operations of one call: those of the kernels' loops, and the fewest that the result needs."""

from collections.abc import Sequence

import jax.numpy as jnp

from pallas_kernels.common.report import Cost
from pallas_kernels.ragged_paged_attention.arg_specs import ArgSpec
from pallas_kernels.ragged_paged_attention.blocks import GpuBlocks, TpuBlocks

Lens = Sequence[tuple[int, int]]
"""(cached_len, extend_len) of each sequence."""


def _first(position: int, spec: ArgSpec) -> int:
    window = position - spec.window + 1 if spec.window else 0
    return max(0, window, position // spec.chunk * spec.chunk if spec.chunk else 0)


def _row_bytes(spec: ArgSpec, dim: int) -> int:
    """Bytes of a position's keys and values in `dim` lanes, with their scales where these are data."""
    return 2 * spec.kv_heads * (dim * jnp.dtype(spec.pool_dtype).itemsize + (4 if spec.scaled else 0))


def fewest(spec: ArgSpec, lens: Lens) -> Cost:
    """Each key in view read once a sequence, new rows written once; queries and output in bfloat16.

    Of a shard: its share of all of these, but every query and output.
    """
    row = _row_bytes(spec, spec.dim)
    tokens = sum(extend for _, extend in lens)
    keys = sum(cached + extend - _first(cached, spec) for cached, extend in lens if extend)
    seen = sum(p + 1 - _first(p, spec) for cached, extend in lens for p in range(cached, cached + extend))
    new = tokens * 2 * spec.kv_heads * spec.dim * 2
    return Cost(
        bytes=((keys + tokens) * row + new) // spec.shards + 2 * tokens * spec.heads * spec.dim * 2,
        flops=4 * seen * spec.heads * spec.dim // spec.shards,
    )


def tpu_cost(spec: ArgSpec, lens: Lens, blocks: TpuBlocks) -> Cost:
    """Whole pages fetched once a block of queries, whole chunks multiplied; queries and output in float32."""
    lanes, group = -(-spec.dim // 128) * 128, spec.heads // spec.kv_heads
    row, slots = _row_bytes(spec, lanes), spec.page_size // spec.shards
    moved = flops = 0
    for position, last, block_q in _blocks(lens, blocks.block_q):
        pages = last // spec.page_size + 1 - _first(position, spec) // spec.page_size
        chunks = -(-pages // blocks.pages)
        moved += pages * slots * row + 2 * block_q * spec.heads * lanes * 4
        flops += 4 * chunks * blocks.pages * slots * block_q * group * spec.kv_heads * lanes
    return Cost(moved + sum(2 * extend * row // spec.shards for _, extend in lens), flops)


def gpu_cost(spec: ArgSpec, lens: Lens, blocks: GpuBlocks) -> Cost:
    """Keys in view read once a block of queries, whole steps multiplied, rows rounded up to powers of two.

    Mosaic GPU's prefill reads whole steps and multiplies whole blocks, whose rows are put together before and taken
    apart after.
    """
    mosaic, group = blocks.prefill == "mosaic", spec.heads // spec.kv_heads
    size = group if mosaic else 1 << (group - 1).bit_length()
    dim = 1 << (spec.dim - 1).bit_length()
    row = _row_bytes(spec, spec.dim)
    moved = flops = 0
    for position, last, block_q in _blocks(lens, max(1, blocks.rows // size)):
        first, end = (-(-at // spec.shards) for at in (_first(position, spec), last + 1))
        steps = -(-(end - first // blocks.keys * blocks.keys) // blocks.keys)
        rows, fetched = max(16, block_q * size), end - first
        if mosaic and block_q > 1:
            rows, fetched = blocks.rows, steps * blocks.keys
            moved += 4 * rows * spec.kv_heads * spec.dim * 2
        moved += fetched * row + 2 * (last + 1 - position) * spec.heads * spec.dim * 2
        flops += 4 * steps * blocks.keys * rows * spec.kv_heads * dim
    return Cost(moved + sum(3 * extend * row // spec.shards for _, extend in lens), flops)


def _blocks(lens: Lens, block_q: int):
    """(first position, last position, padded queries) of every work item."""
    for cached, extend in lens:
        width = 1 if extend == 1 else block_q
        for start in range(cached, cached + extend, width):
            yield start, min(start + width, cached + extend) - 1, width

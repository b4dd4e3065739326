"""Bytes and operations of one call: those of the kernels' loops, and the fewest that the result needs."""

from collections.abc import Iterator, Sequence

import jax.numpy as jnp

from pallas_kernels.common.report import Cost
from pallas_kernels.latent_paged_attention.arg_specs import ArgSpec
from pallas_kernels.latent_paged_attention.blocks import GpuBlocks, Shape, TpuBlocks

Lens = Sequence[tuple[int, int]]
"""(cached_len, extend_len) of each sequence."""


def shape_of(spec: ArgSpec, platform: str) -> Shape:
    """What the kernel's blocks depend on."""
    width = spec.pool(platform, 1).shape[3]
    return Shape(spec.heads, spec.rank, width, spec.page_size // spec.shards, spec.pool_dtype)


def _row_bytes(spec: ArgSpec, width: int) -> int:
    """Bytes of a position's latents, with their scales where the pool has 8 bits."""
    itemsize = jnp.dtype(spec.pool_dtype).itemsize
    return width * itemsize + (8 if itemsize == 1 else 0)


def _query_bytes(spec: ArgSpec) -> int:
    """Bytes of a token's queries (bfloat16) and output: bfloat16, float32 from a shard."""
    return spec.heads * ((spec.rank + spec.rope) * 2 + spec.rank * (2 if spec.shards == 1 else 4))


def fewest(spec: ArgSpec, lens: Lens) -> Cost:
    """Each latent in view read once a sequence, new ones written once; of a shard its share of these."""
    row, tokens = _row_bytes(spec, spec.rank + spec.rope), sum(extend for _, extend in lens)
    keys = sum(cached + extend for cached, extend in lens if extend)
    seen = sum(p + 1 for cached, extend in lens for p in range(cached, cached + extend))
    new = tokens * (spec.rank + spec.rope) * 2
    return Cost(
        bytes=((keys + tokens) * row + new) // spec.shards + tokens * _query_bytes(spec),
        flops=2 * seen * spec.heads * (2 * spec.rank + spec.rope) // spec.shards,
    )


def tpu_cost(spec: ArgSpec, lens: Lens, blocks: TpuBlocks) -> Cost:
    """Whole pages fetched once a block of queries, whole chunks multiplied."""
    shape = shape_of(spec, "tpu")
    row, slots, moved, flops = _row_bytes(spec, shape.width), shape.page_size, 0, 0
    for _, last, queries in _blocks(lens, 1, blocks.queries(shape)):
        pages = last // spec.page_size + 1
        keys = -(-pages // blocks.pages) * blocks.pages * slots
        moved += pages * slots * row + queries * _query_bytes(spec)
        flops += 2 * keys * queries * spec.heads * (shape.width + spec.rank)
    return Cost(moved + sum(2 * extend for _, extend in lens) * row // spec.shards, flops)


def gpu_cost(spec: ArgSpec, lens: Lens, blocks: GpuBlocks) -> Cost:
    """Latents in view read once a block of queries and heads, whole steps multiplied, sums kept in float32."""
    shape = shape_of(spec, "gpu")
    heads = blocks.head_block(shape)
    programs, row = -(-spec.heads // heads), _row_bytes(spec, shape.width)
    moved = flops = 0
    for first, last, queries in _blocks(lens, max(1, 16 // heads), max(1, 16 // heads, blocks.rows // heads)):
        keys = -(-(last + 1) // spec.shards)
        steps = -(-keys // blocks.keys)
        moved += programs * keys * row + (last + 1 - first) * (_query_bytes(spec) + 8 * spec.heads * spec.rank)
        flops += 2 * steps * blocks.keys * queries * heads * programs * (shape.width + spec.rank)
    return Cost(moved + sum(2 * extend for _, extend in lens) * row // spec.shards, flops)


def _blocks(lens: Lens, decode: int, prefill: int) -> Iterator[tuple[int, int, int]]:
    """(first position, last position, padded queries) of every work item."""
    for cached, extend in lens:
        if extend == 1:
            yield cached, cached, decode
            continue
        for start in range(cached, cached + extend, prefill):
            yield start, min(start + prefill, cached + extend) - 1, prefill

"""Block sizes of the TPU kernel: how many queries and pages are held at a time, within vector memory."""

from dataclasses import dataclass

from jaxtyping import Array

LANES, SUBLANES = 128, 8
BUDGET = 24 * 2**20
"""Bytes of vector memory to plan with; the smallest chip here (TPU7x) has 64 MiB a core."""


@dataclass(frozen=True)
class BlockSizes:
    """Queries of a block and pages of a chunk."""

    block_q: int
    pages: int


def vmem_bytes(pool: Array, rows: int, pages: int) -> int:
    """Vector memory that the kernel may take, in bytes; `rows` is block_q times query heads per KV head."""
    _, _, page_size, words, pack, dim = pool.shape
    keys, kv_heads = pages * page_size, words * pack // 2
    padded = -(-rows // SUBLANES) * SUBLANES
    chunk = 2 * keys * words * max(pack * pool.dtype.itemsize, 4) * dim
    queries = kv_heads * (4 * rows * dim + padded * (3 * LANES + dim)) * 4
    work = 4 * (padded * keys * 4) + 6 * keys * dim * 4
    return chunk + queries + work + 4 * 2**20


def choose_blocks(pool: Array, heads: int, table_width: int, longest: int) -> BlockSizes:
    """The largest blocks, up to 1024 keys and 128 queries, that the budget holds.

    Args:
      heads: query heads. table_width: blocks of the longest sequence.
      longest: most query tokens of a sequence.
    """
    page_size, kv_heads = pool.shape[2], pool.shape[3] * pool.shape[4] // 2
    pages = max(1, min(table_width, 1024 // page_size))
    block_q = min(128, longest)
    group = heads // kv_heads
    while vmem_bytes(pool, block_q * group, pages) > BUDGET and (block_q > 16 or pages > 1):
        if block_q > 16 and (block_q * group > pages * page_size or pages == 1):
            block_q = max(16, block_q // 2)
        else:
            pages = max(1, pages // 2)
    return BlockSizes(block_q, pages)

"""Bytes and operations of one product: those of the kernels' loops, and the fewest that the result needs."""

from math import prod

import jax

from pallas_kernels.common.report import Cost
from pallas_kernels.quantised_matmul import gpu, tpu
from pallas_kernels.quantised_matmul.arg_specs import ArgSpec


def stored_bytes(weight) -> int:
    """Bytes of a weight's arrays, or of a pytree of them."""
    return sum(prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(weight))


def fewest(spec: ArgSpec, tokens: int) -> Cost:
    """One layer's weight read once, activations in bfloat16 read and written once."""
    weight = stored_bytes(spec.abstract(1, 1)[1])
    return Cost(weight + tokens * (spec.n_in + spec.n_out) * 2, 2 * tokens * spec.n_in * spec.n_out)


def tpu_cost(spec: ArgSpec, tokens: int) -> tuple[Cost, int]:
    """Of the kernel, and its vector memory: a tile of weight rows is read once, all activations once a tile."""
    tile, rows = min(tpu.MOST_TOKENS, -(-tokens // 16) * 16), tpu.row_tile(spec.n_out, spec.n_in, 1, quantised=True)
    padded, tiles = -(-tokens // tile) * tile, -(-spec.n_out // rows)
    weight = stored_bytes(spec.abstract(1, 1)[1]) * tiles * rows // spec.n_out
    moved = weight + tiles * padded * spec.n_in * 2 + padded * tiles * rows * 2
    scratch = 2 * (weight // tiles + tile * (spec.n_in + rows) * 2) + rows * spec.n_in * 4
    return Cost(moved, 2 * padded * spec.n_in * tiles * rows), scratch


def gpu_cost(spec: ArgSpec, tokens: int) -> tuple[Cost, int]:
    """Of the kernel, and its shared memory: the weight is read once a tile of tokens, and these once a tile of rows."""
    tile = min(gpu.MOST_TOKENS, max(16, 1 << (tokens - 1).bit_length()))
    down, across = -(-tokens // tile), -(-spec.n_out // gpu.OUT_TILE)
    weight = stored_bytes(spec.abstract(1, 1)[1])
    moved = down * weight + across * tokens * spec.n_in * 2 + tokens * spec.n_out * 2
    scratch = gpu.STAGES * (tile + gpu.OUT_TILE) * 64 * 2
    return Cost(moved, 2 * down * tile * spec.n_in * across * gpu.OUT_TILE), scratch

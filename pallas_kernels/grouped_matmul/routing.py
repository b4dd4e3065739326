"""Tokens sorted by expert, and the blocks of rows that a kernel visits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels.quantised_matmul.formats import slice_leading


class Routing(NamedTuple):
    """The (token, choice) pairs of a batch, N = T*k rows, those of one expert beside each other.

    Rows at and past sum(group_sizes) belong to experts that are not here.
    """

    order: Int[Array, "N"]  # flat index token * k + choice of each row
    token: Int[Array, "N"]
    group_sizes: Int[Array, "E"]


class Blocks(NamedTuple):
    """Blocks of consecutive rows of one group each; only the first `count` are real."""

    group: Int[Array, "B"]
    start: Int[Array, "B"]
    size: Int[Array, "B"]
    count: Int[Array, ""]


def route(expert_ids: Int[Array, "T k"], experts: int, offset: Int[Array, ""] | int) -> Routing:
    """Sorts the pairs by expert; experts outside [offset, offset + experts) go last."""
    choices = expert_ids.shape[1]
    local = expert_ids.reshape(-1).astype(jnp.int32) - jnp.asarray(offset, jnp.int32)
    local = jnp.where(is_local(local, experts), local, experts)
    order = jnp.argsort(local, stable=True).astype(jnp.int32)
    sizes = jnp.zeros(experts + 1, jnp.int32).at[local].add(1)[:experts]
    return Routing(order, order // choices, sizes)


def is_local(local: Int[Array, "..."], experts: int) -> Bool[Array, "..."]:
    """Whether an expert number, less the offset of this shard, is one of its experts."""
    return (local >= 0) & (local < experts)


def split_groups(group_sizes: Int[Array, "E"], rows: int, block: int) -> Blocks:
    """Cuts each group into blocks of at most `block` rows that begin at the group's own start.

    `rows` bounds the sum of the sizes. Empty groups have no block.
    """
    experts = group_sizes.shape[0]
    most = min(experts, rows) + rows // block
    per_group = (group_sizes + block - 1) // block
    ends = jnp.cumsum(per_group)
    first_row = jnp.cumsum(group_sizes) - group_sizes
    index = jnp.arange(most, dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(ends, index, side="right"), experts - 1).astype(jnp.int32)
    within = index - (ends - per_group)[group]
    size = jnp.clip(group_sizes[group] - within * block, 0, block)
    return Blocks(group, first_row[group] + within * block, size, ends[-1])


class Visits(NamedTuple):
    """Pairs of a group and a tile of rows that holds some of them, in row order; past `count` the last is repeated.

    Rows [low, high) of the tile are the group's; the repeats have none.
    """

    group: Int[Array, "V"]
    tile: Int[Array, "V"]
    low: Int[Array, "V"]
    high: Int[Array, "V"]


def visit_tiles(group_sizes: Int[Array, "E"], rows: int, tile: int) -> Visits:
    """The visits of tiles of `tile` rows; `rows` is a multiple of it and bounds the sum of the sizes."""
    experts = group_sizes.shape[0]
    ends = jnp.cumsum(group_sizes)
    starts = ends - group_sizes
    per_group = jnp.where(group_sizes > 0, (ends - 1) // tile - starts // tile + 1, 0)
    visit_ends = jnp.cumsum(per_group)
    index = jnp.arange(rows // tile + min(experts, rows), dtype=jnp.int32)
    visit = jnp.minimum(index, jnp.maximum(visit_ends[-1] - 1, 0))
    group = jnp.minimum(jnp.searchsorted(visit_ends, visit, side="right"), experts - 1).astype(jnp.int32)
    row_tile = starts[group] // tile + visit - (visit_ends - per_group)[group]
    row_tile = jnp.clip(row_tile, 0, rows // tile - 1)
    low = jnp.clip(starts[group] - row_tile * tile, 0, tile)
    high = jnp.clip(ends[group] - row_tile * tile, 0, tile)
    real = index < visit_ends[-1]
    return Visits(group, row_tile, jnp.where(real, low, 0), jnp.where(real, high, 0))


def inverse(order: Int[Array, "N"]) -> Int[Array, "N"]:
    """Row of each flat (token, choice) pair."""
    return jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype))


def block_rows(rows: int, experts: int, least: int, most: int) -> int:
    """A power of two near the mean group size, within [least, most]."""
    mean = max(1, -(-rows // experts))
    return min(most, max(least, 1 << (mean - 1).bit_length()))


def select(weight, *index):
    """The matrix at leading indices of an array or a quantised weight, without touching the rest."""
    cut = slice_leading(weight, index, [1] * len(index))
    return jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[len(index) :]), cut)

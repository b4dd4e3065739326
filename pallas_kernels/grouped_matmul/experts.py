"""What the kernels of all platforms share: rows sorted by expert go in, and come back to their tokens."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul import slices
from pallas_kernels.grouped_matmul.routing import block_rows, inverse, is_local, route
from pallas_kernels.quantised_matmul import tiles
from pallas_kernels.quantised_matmul.formats import QuantisedTensor

LEAST_TILE = 16


def grouped_matmul(
    project: Callable[..., Array],
    x: Float[Array, "N M"],
    weight: Array | QuantisedTensor,
    group_sizes: Int[Array, " E"],
    *,
    layer: Int[Array, ""] | None,
    bias: Float[Array, "..."] | None,
    most_tile: int,
    split: bool,
) -> Float[Array, "N F"]:
    """See `api.grouped_matmul`; `project` is a platform's kernel."""
    rows = x.shape[0]
    tile = block_rows(rows, group_sizes.shape[0], LEAST_TILE, most_tile)
    planes = tiles.split_planes(jnp.pad(x, ((0, -rows % tile), (0, 0))), _planes(weight, split))
    y = project(planes, weight, bias, group_sizes, tile, layer, None)[:rows]
    return jnp.where((jnp.arange(rows) < group_sizes.sum())[:, None], y, 0)


def grouped_ffn(
    project: Callable[..., Array],
    x: Float[Array, "T M"],
    gate_up: Array | QuantisedTensor,
    down: Array | QuantisedTensor,
    expert_ids: Int[Array, "T k"],
    expert_weights: Float[Array, "T k"],
    *,
    activation: str,
    gate_up_bias: Float[Array, "..."] | None,
    down_bias: Float[Array, "..."] | None,
    scores_on_input: bool,
    layer: Int[Array, ""] | None,
    expert_offset: Int[Array, ""] | int,
    out_dtype: str,
    most_tile: int,
    split: bool,
    fewer_columns: int = 1,
) -> Float[Array, "T M"]:
    """See `api.grouped_ffn`. Gate, up and activation are one call of the kernel, down another, each in slices."""
    (tokens, choices), experts = expert_ids.shape, down.shape[-3]
    routing = route(expert_ids, experts, expert_offset)
    rows = tokens * choices
    tile = block_rows(rows, experts, LEAST_TILE, most_tile)
    scores = expert_weights.astype(jnp.float32).reshape(-1)
    planes = tiles.split_planes(x, _planes(gate_up, split))
    at_once = slices.rows_at_once(rows, x.shape[1] * x.dtype.itemsize, tile) if split else -(-rows // tile) * tile
    padding = (0, -rows % at_once)
    token, by_row = jnp.pad(routing.token, padding), jnp.pad(scores[routing.order], padding)

    def enter(first, sizes):
        inputs = planes[:, lax.dynamic_slice(token, (first,), (at_once,))]
        if scores_on_input:
            factor = lax.dynamic_slice(by_row, (first,), (at_once,))
            inputs = (inputs.astype(jnp.float32) * factor[:, None]).astype(x.dtype)
        hidden = project(inputs, gate_up, gate_up_bias, sizes, tile, layer, activation)
        return tiles.split_planes(hidden, down_planes)

    down_planes = _planes(down, split)
    read = (planes, gate_up, gate_up_bias, token, by_row, layer)
    shape = (down_planes, down.shape[-1] // down_planes)
    hidden = slices.by_rows(enter, routing.group_sizes, rows, at_once, shape, x.dtype, read)
    place = inverse(routing.order)
    here = is_local(expert_ids.astype(jnp.int32) - jnp.asarray(expert_offset, jnp.int32), experts)
    factor = (jnp.ones_like(scores) if scores_on_input else scores).reshape(tokens, choices, 1)

    def leave(columns):
        """These columns of every token: (first, how many), or None for all."""
        y = project(hidden, down, down_bias, routing.group_sizes, tile, layer, None, columns)
        parts = y[place].reshape(tokens, choices, -1).astype(jnp.float32)
        return jnp.where(here[..., None], parts * factor, 0).sum(axis=1).astype(out_dtype)

    width = down.shape[-2]
    few = slices.columns_at_once(rows, width, x.dtype.itemsize, fewer_columns) if split else width
    if few == width:
        return leave(None)
    read = (hidden, down, down_bias, routing.group_sizes, place, here, factor, layer)
    return slices.by_columns(lambda first: leave((first, few)), tokens, width, few, jnp.dtype(out_dtype), read)


def _planes(weight: Array | QuantisedTensor, split: bool) -> int:
    return tiles.plane_count(weight) if split else 1


def with_kernel(
    project: Callable[..., Array], most_tile: int, interpret, split: bool, fewer_columns: int = 1
) -> tuple[Callable, Callable]:
    """`grouped_matmul` and `grouped_ffn` on a platform's kernel.

    `most_tile` is the most rows of a tile; `split`, whether the kernel takes activations split into planes,
    and slices of columns; `fewer_columns`, the part of a slice's bytes that columns may take, as a divisor.
    """
    kernel = functools.partial(project, interpret=interpret)
    return (
        functools.partial(grouped_matmul, kernel, most_tile=most_tile, split=split),
        functools.partial(grouped_ffn, kernel, most_tile=most_tile, split=split, fewer_columns=fewer_columns),
    )

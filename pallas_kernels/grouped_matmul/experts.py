"""What the kernels of all platforms share: rows sorted by expert go in, and come back to their tokens."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

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
    most_tile: int,
    split: bool,
) -> Float[Array, "T M"]:
    """See `api.grouped_ffn`. Gate, up and activation are one call of the kernel, down another."""
    (tokens, choices), experts = expert_ids.shape, down.shape[-3]
    routing = route(expert_ids, experts, expert_offset)
    rows = tokens * choices
    tile = block_rows(rows, experts, LEAST_TILE, most_tile)
    padding = (0, -rows % tile)
    scores = expert_weights.astype(jnp.float32).reshape(-1)
    inputs = tiles.split_planes(x, _planes(gate_up, split))[:, jnp.pad(routing.token, padding)]
    if scores_on_input:
        by_row = jnp.pad(scores[routing.order], padding)
        inputs = (inputs.astype(jnp.float32) * by_row[:, None]).astype(x.dtype)
    hidden = project(inputs, gate_up, gate_up_bias, routing.group_sizes, tile, layer, activation)
    hidden = tiles.split_planes(hidden, _planes(down, split))
    y = project(hidden, down, down_bias, routing.group_sizes, tile, layer, None)
    here = is_local(expert_ids.astype(jnp.int32) - jnp.asarray(expert_offset, jnp.int32), experts)
    parts = y[inverse(routing.order)].reshape(tokens, choices, -1).astype(jnp.float32)
    factor = jnp.ones_like(scores) if scores_on_input else scores
    parts = jnp.where(here[..., None], parts * factor.reshape(tokens, choices, 1), 0)
    return parts.sum(axis=1).astype(x.dtype)


def _planes(weight: Array | QuantisedTensor, split: bool) -> int:
    return tiles.plane_count(weight) if split else 1


def with_kernel(project: Callable[..., Array], most_tile: int, interpret, split: bool) -> tuple[Callable, Callable]:
    """`grouped_matmul` and `grouped_ffn` on a platform's kernel.

    `most_tile` is the most rows of a tile; `split`, whether the kernel takes activations split into planes.
    """
    kernel = functools.partial(project, interpret=interpret)
    return (
        functools.partial(grouped_matmul, kernel, most_tile=most_tile, split=split),
        functools.partial(grouped_ffn, kernel, most_tile=most_tile, split=split),
    )

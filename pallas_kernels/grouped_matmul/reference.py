"""Grouped matmuls in plain XLA: the reference, and what runs on a CPU.

A loop over blocks of rows of one expert each, with as many steps as there are blocks: an expert without
tokens is never touched, and one weight matrix at a time is sliced and dequantised.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.common.varying import vary_like
from pallas_kernels.grouped_matmul.activations import ACTIVATIONS
from pallas_kernels.grouped_matmul.routing import block_rows, route, select, split_groups
from pallas_kernels.quantised_matmul.formats import QuantisedTensor
from pallas_kernels.quantised_matmul.reference import matmul, multiply_f32

LEAST_BLOCK, MOST_BLOCK = 8, 128


def grouped_matmul(
    x: Float[Array, "N M"],
    weight: Array | QuantisedTensor,
    group_sizes: Int[Array, "E"],
    *,
    layer: Int[Array, ""] | None,
    bias: Float[Array, "..."] | None,
) -> Float[Array, "N F"]:
    """See `api.grouped_matmul`."""
    rows, experts = x.shape[0], group_sizes.shape[0]
    block = block_rows(rows, experts, LEAST_BLOCK, MOST_BLOCK)
    blocks = split_groups(group_sizes, rows, block)
    padded = jnp.pad(x, ((0, block), (0, 0)))

    def step(i, y):
        index = _index(layer, blocks.group[i])
        part = _project(jax.lax.dynamic_slice_in_dim(padded, blocks.start[i], block), weight, bias, index)
        old = jax.lax.dynamic_slice_in_dim(y, blocks.start[i], block)
        real = (jnp.arange(block) < blocks.size[i])[:, None]
        return jax.lax.dynamic_update_slice_in_dim(y, jnp.where(real, part.astype(y.dtype), old), blocks.start[i], 0)

    y = jnp.zeros((rows + block, weight.shape[-2]), x.dtype)
    y = vary_like(y, x, weight, group_sizes, layer, bias)
    return jax.lax.fori_loop(0, blocks.count, step, y)[:rows]


def grouped_ffn(
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
) -> Float[Array, "T M"]:
    """See `api.grouped_ffn`. Nothing of N = T*k rows by a model or ffn width is ever held."""
    tokens, model = x.shape
    experts = down.shape[-3]
    routing = route(expert_ids, experts, expert_offset)
    rows = routing.order.shape[0]
    block = block_rows(rows, experts, LEAST_BLOCK, MOST_BLOCK)
    blocks = split_groups(routing.group_sizes, rows, block)
    weights = expert_weights.astype(jnp.float32).reshape(-1)
    combine = ACTIVATIONS[activation]

    def step(i, y):
        index = _index(layer, blocks.group[i])
        row = jnp.minimum(blocks.start[i] + jnp.arange(block), rows - 1)
        token, score = routing.token[row], weights[routing.order[row]][:, None]
        inputs = x[token]
        if scores_on_input:
            inputs = (inputs.astype(jnp.float32) * score).astype(x.dtype)
        gate = _project(inputs, gate_up, gate_up_bias, (*index, 0))
        up = _project(inputs, gate_up, gate_up_bias, (*index, 1))
        hidden = combine(gate, up).astype(x.dtype)
        out = _project(hidden, down, down_bias, index)
        if not scores_on_input:
            out = out * score
        target = jnp.where(jnp.arange(block) < blocks.size[i], token, tokens)
        return y.at[target].add(out, mode="drop")

    y = vary_like(jnp.zeros((tokens, model), jnp.float32), x, gate_up, down, routing, weights, layer)
    return jax.lax.fori_loop(0, blocks.count, step, y).astype(out_dtype)


def _index(layer: Int[Array, ""] | None, expert: Int[Array, ""]) -> tuple[Int[Array, ""], ...]:
    return (expert,) if layer is None else (layer, expert)


def _project(x, weight, bias, index) -> Float[Array, "B out"]:
    """x @ weight[index].T + bias[index] in float32."""
    chosen = select(weight, *index)
    quantised = isinstance(chosen, QuantisedTensor)
    y = multiply_f32(x, chosen) if quantised else matmul(x, chosen.astype(x.dtype))
    return y if bias is None else y + select(bias, *index).astype(jnp.float32)

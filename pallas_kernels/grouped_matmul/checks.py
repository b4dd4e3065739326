"""Refusal of arguments that do not fit, when tracing."""

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.grouped_matmul.activations import ACTIVATIONS
from pallas_kernels.quantised_matmul.api import check_activations, check_weight
from pallas_kernels.quantised_matmul.formats import QuantisedTensor


def check_grouped_matmul(
    x: Array, weight: Array | QuantisedTensor, group_sizes: Array, layer, bias: Array | None
) -> None:
    """Raises ValueError where shapes or dtypes contradict each other; the message names both sides."""
    check_activations(x)
    check_weight("weight", weight, 3, layer)
    if x.shape[1] != weight.shape[-1]:
        raise ValueError(f"x is {x.shape}, the weight {weight.shape}: x must have in={weight.shape[-1]} columns.")
    if group_sizes.shape != (weight.shape[-3],):
        raise ValueError(
            f"group_sizes must have an entry for each of {weight.shape[-3]} groups; got {group_sizes.shape}."
        )
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(f"group_sizes must be integers; got {group_sizes.dtype.name}.")
    _check_bias("bias", bias, weight)


def check_ffn(
    x: Array,
    gate_up: Array | QuantisedTensor,
    down: Array | QuantisedTensor,
    expert_ids: Array,
    expert_weights: Array,
    activation: str,
    gate_up_bias: Array | None,
    down_bias: Array | None,
    layer,
) -> None:
    """Raises ValueError where shapes, dtypes or the activation's name do not fit; the message names both sides."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not known; use one of {', '.join(ACTIVATIONS)}.")
    check_activations(x)
    check_weight("gate_up", gate_up, 4, layer)
    check_weight("down", down, 3, layer)
    experts, _, ffn, model = gate_up.shape[-4:]
    if gate_up.shape[-3] != 2 or model != x.shape[1]:
        raise ValueError(f"gate_up must be [..., E, 2, F, M] with M={x.shape[1]} as in x; got {gate_up.shape}.")
    if down.shape[-3:] != (experts, model, ffn):
        raise ValueError(f"gate_up {gate_up.shape} needs down [..., {experts}, {model}, {ffn}]; got {down.shape}.")
    if expert_ids.ndim != 2 or expert_ids.shape[0] != x.shape[0] or expert_ids.shape != expert_weights.shape:
        raise ValueError(
            f"expert_ids and expert_weights must both be [T, k] with T={x.shape[0]};"
            f" got {expert_ids.shape} and {expert_weights.shape}."
        )
    if not jnp.issubdtype(expert_ids.dtype, jnp.integer):
        raise ValueError(f"expert_ids must be integers; got {expert_ids.dtype.name}.")
    _check_bias("gate_up_bias", gate_up_bias, gate_up)
    _check_bias("down_bias", down_bias, down)


def _check_bias(name: str, bias: Array | None, weight: Array | QuantisedTensor) -> None:
    if bias is not None and bias.shape != weight.shape[:-1]:
        raise ValueError(f"{name} must be {weight.shape[:-1]}, a value for each row of the weight; got {bias.shape}.")

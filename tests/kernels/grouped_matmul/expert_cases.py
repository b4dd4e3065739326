"""Mixture-of-experts feed-forward in numpy float64, one token and one expert at a time, and inputs to try it on."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import quantised_matmul
from pallas_kernels.quantised_matmul import QuantisedTensor

dequantise = jax.jit(quantised_matmul.dequantise)
quantise = functools.partial(jax.jit, static_argnames="format")(quantised_matmul.quantise)


@dataclass(frozen=True)
class Case:
    """Shapes of one call; `format` None keeps the weights in `dtype`; `poisoned` experts hold NaN and get no token."""

    tokens: int = 9
    choices: int = 2
    experts: int = 5
    model: int = 64
    ffn: int = 96
    layers: int | None = None
    format: str | None = None
    activation: str = "silu"
    biases: bool = False
    scores_on_input: bool = False
    dtype: str = "float32"
    poisoned: tuple[int, ...] = (1,)
    padded_tokens: int = 0
    seed: int = 0


SLICED = {
    "plain": Case(tokens=70, experts=3, model=256, ffn=160, layers=2, biases=True, padded_tokens=9),
    "scores_on_input": Case(tokens=70, experts=3, model=256, choices=1, scores_on_input=True),
    "int8": Case(tokens=70, experts=3, model=256, format="int8", layers=2, biases=True),
    "int4": Case(tokens=70, experts=3, model=256, format="int4"),
    "fp8": Case(tokens=70, experts=3, model=384, ffn=300, format="fp8", layers=2),
}
"""For slices of 32 KiB: several of rows, and several of columns."""


def build(case: Case) -> dict:
    """Arguments of `grouped_ffn` by name, weights in their final format."""
    rng = np.random.default_rng(case.seed)
    leading = () if case.layers is None else (case.layers,)

    def draw(*shape, size=1.0):
        return jnp.asarray(rng.normal(size=shape) * size, case.dtype)

    def weight(*shape):
        w = draw(*leading, case.experts, *shape, size=shape[-1] ** -0.5)
        t = w if case.format is None else quantise(w, format=case.format)
        return jax.tree.map(functools.partial(poison, case), t)

    usable = [e for e in range(case.experts) if e not in case.poisoned]
    ids = np.stack([rng.permutation(usable)[: case.choices] for _ in range(case.tokens)]).astype(np.int32)
    ids[case.tokens - case.padded_tokens :] = -1
    x = np.array(draw(case.tokens, case.model))
    x[case.tokens - case.padded_tokens :] = np.nan
    args = {
        "x": jnp.asarray(x),
        "gate_up": weight(2, case.ffn, case.model),
        "down": weight(case.model, case.ffn),
        "expert_ids": jnp.asarray(ids),
        "expert_weights": jnp.asarray(rng.uniform(0.1, 1, size=ids.shape), jnp.float32),
    }
    if case.biases:
        args["gate_up_bias"] = draw(*leading, case.experts, 2, case.ffn)
        args["down_bias"] = draw(*leading, case.experts, case.model)
    return args


def poison(case: Case, leaf: jax.Array) -> jax.Array:
    """NaN in the experts that must not be read, and in every layer but the last."""
    bad = jnp.asarray(jnp.nan, leaf.dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else None
    if bad is None:
        return leaf
    if case.layers is not None:
        leaf = leaf.at[:-1].set(bad)
    for expert in case.poisoned:
        leaf = leaf.at[..., expert, *([slice(None)] * (leaf.ndim - 1 - (case.layers is not None)))].set(bad)
    return leaf


def activate(name: str, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    if name == "silu":
        return gate / (1 + np.exp(-gate)) * up
    if name == "gelu_tanh":
        return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)


def dense(case: Case, args: dict) -> np.ndarray:
    """What `grouped_ffn` must return, in float64; experts of other shards and padding contribute zero."""

    def last_layer(value):
        value = dequantise(value) if isinstance(value, QuantisedTensor) else value
        value = np.asarray(value, np.float64)
        return value if case.layers is None else value[-1]

    gate_up, down = last_layer(args["gate_up"]), last_layer(args["down"])
    zero_up, zero_down = np.zeros(gate_up.shape[:-1]), np.zeros(down.shape[:-1])
    up_bias = last_layer(args["gate_up_bias"]) if case.biases else zero_up
    down_bias = last_layer(args["down_bias"]) if case.biases else zero_down
    out = np.zeros((case.tokens, case.model))
    for t, k in np.ndindex(case.tokens, case.choices):
        expert, score = int(args["expert_ids"][t, k]), float(args["expert_weights"][t, k])
        if expert < 0:
            continue
        x = np.asarray(args["x"][t], np.float64) * (score if case.scores_on_input else 1)
        gate, up = gate_up[expert] @ x + up_bias[expert]
        y = down[expert] @ activate(case.activation, gate, up) + down_bias[expert]
        out[t] += y * (1 if case.scores_on_input else score)
    return out


def check(case: Case, op) -> None:
    """Asserts that `op(**args, activation=…, …)` gives the right output."""
    args = build(case)
    options = {"activation": case.activation, "scores_on_input": case.scores_on_input}
    layer = None if case.layers is None else jnp.int32(case.layers - 1)
    out = op(**args, **options, layer=layer)
    tolerance = {"float32": 1e-5, "bfloat16": 2e-2}[case.dtype]
    assert out.dtype == args["x"].dtype
    np.testing.assert_allclose(np.asarray(out, np.float64), dense(case, args), atol=tolerance, rtol=tolerance)

"""The XLA reference of the expert matmuls against a loop over tokens in float64."""

import functools

import expert_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_cases import Case
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped_matmul import grouped_ffn, grouped_matmul

STATIC = ("activation", "scores_on_input")
reference = jax.jit(functools.partial(grouped_ffn, backend="reference"), static_argnames=STATIC)
CASES = {
    "one_token": Case(tokens=1),
    "mixed": Case(),
    "many_tokens": Case(tokens=200, experts=3),
    "top_one": Case(choices=1, scores_on_input=True),
    "padding": Case(padded_tokens=4),
    "all_padding": Case(padded_tokens=9),
    "biases": Case(activation="clamped_swiglu", biases=True),
    "gelu": Case(activation="gelu_tanh"),
    "int8": Case(format="int8", layers=2),
    "int4": Case(format="int4", layers=2),
    "fp8": Case(format="fp8", layers=2, model=160),
    "mxfp4": Case(format="mxfp4", layers=2, activation="clamped_swiglu", biases=True),
    "bfloat16": Case(dtype="bfloat16", layers=3),
    "bfloat16_int4_affine": Case(dtype="bfloat16", format="int4_affine"),
}


@pytest.mark.parametrize("name", CASES)
def test_it_equals_a_loop_over_tokens(name):
    expert_cases.check(CASES[name], reference)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 23), st.sets(st.integers(0, 7), max_size=5))
def test_any_routing_equals_a_loop_over_tokens(seed, padded, poisoned):
    case = Case(tokens=24, choices=3, experts=8, seed=seed, padded_tokens=padded, poisoned=tuple(poisoned))
    expert_cases.check(case, reference)


def test_shards_of_the_experts_sum_to_the_whole():
    case = Case(tokens=30, choices=3, experts=8, poisoned=(), biases=True)
    args = expert_cases.build(case)
    experts = {name: value for name, value in args.items() if name not in ("x", "expert_ids", "expert_weights")}
    rest = {name: value for name, value in args.items() if name not in experts}
    total = 0
    for offset in range(0, 8, 2):
        shard = {name: value[offset : offset + 2] for name, value in experts.items()}
        total += reference(**rest, **shard, activation="silu", expert_offset=offset)
    np.testing.assert_allclose(total, expert_cases.dense(case, args), atol=1e-5)


def test_an_expert_shard_runs_inside_shard_map():
    case = Case(tokens=10, experts=4, poisoned=())
    args = expert_cases.build(case)
    devices = np.array(jax.devices()[:1])
    mesh = jax.sharding.Mesh(devices, "expert")
    spec = jax.sharding.PartitionSpec

    def local(x, gate_up, down, ids, weights):
        offset = jax.lax.axis_index("expert") * down.shape[0]
        y = grouped_ffn(x, gate_up, down, ids, weights, activation="silu", expert_offset=offset, backend="reference")
        return jax.lax.psum(y, "expert")

    specs = (spec(), spec("expert"), spec("expert"), spec(), spec())
    y = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=spec()))(*args.values())
    np.testing.assert_allclose(y, expert_cases.dense(case, args), atol=1e-5)


@pytest.mark.parametrize("sizes", [[0, 0, 0], [3, 0, 4], [20, 1, 0], [0, 0, 21]])
@pytest.mark.parametrize("format", [None, "int4"])
def test_each_group_is_multiplied_by_its_own_weight(sizes, format):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(21, 64)), jnp.float32)
    w, bias = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((3, 40, 64), (3, 40)))
    weight = w if format is None else expert_cases.quantise(w, format=format)
    dense = w if format is None else expert_cases.dequantise(weight)
    y = jax.jit(functools.partial(grouped_matmul, backend="reference"))(x, weight, jnp.array(sizes), bias=bias)
    expected, row = np.zeros((21, 40)), 0
    for group, size in enumerate(sizes):
        expected[row : row + size] = np.asarray(x)[row : row + size] @ np.asarray(dense)[group].T + bias[group]
        row += size
    np.testing.assert_allclose(y, expected, atol=1e-4)


@pytest.mark.parametrize("format", [None, "int4", "fp8"])
def test_a_scan_over_layers_copies_no_stack_of_experts(format):
    case = Case(layers=6, experts=16, model=256, ffn=256, format=format, poisoned=())
    args = expert_cases.build(case)
    x, ids, weights = args["x"], args["expert_ids"], args["expert_weights"]

    def steps(x, gate_up, down):
        def body(x, layer):
            y = grouped_ffn(x, gate_up, down, ids, weights, activation="silu", layer=layer, backend="reference")
            return x + y, None

        return jax.lax.scan(body, x, jnp.arange(6))[0]

    compiled = jax.jit(steps).lower(x, args["gate_up"], args["down"]).compile()
    stack = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((args["gate_up"], args["down"])))
    one_expert = 3 * 256 * 256 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < min(stack / 4, 3 * one_expert)


def refused(**changes):
    args = expert_cases.build(Case()) | {"activation": "silu"} | changes
    return lambda: grouped_ffn(**args)


WRONG = {
    "activation": (refused(activation="relu"), "'relu' is not known; use one of silu"),
    "gate_up": (refused(gate_up=jnp.zeros((5, 3, 96, 64))), r"E, 2, F, M\] with M=64"),
    "down": (refused(down=jnp.zeros((5, 96, 64))), r"needs down \[..., 5, 64, 96\]"),
    "ids": (refused(expert_ids=jnp.zeros((8, 2), jnp.int32)), "T=9"),
    "float_ids": (refused(expert_ids=jnp.zeros((9, 2))), "must be integers; got float32"),
    "bias": (refused(down_bias=jnp.zeros((5, 96))), r"down_bias must be \(5, 64\)"),
    "layer": (refused(layer=0), "gate_up must have 5 axes"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_with_both_sides_named(name):
    call, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        call()

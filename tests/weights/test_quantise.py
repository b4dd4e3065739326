"""Weights rounded while they load: near what they were, and the same on every mesh."""

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.quantised_matmul import QuantisedTensor, dequantise
from trillion_infer.core.errors import ConfigError
from trillion_infer.testing.checkpoints import write_hf_directory
from trillion_infer.weights import ParamSpec, Source, load_params, open_checkpoint
from trillion_infer.weights.quantise import abstract_quantised
from trillion_infer.weights.rounding import RECIPES, Recipe, packed, scales_of


def rounded(weight: np.ndarray, recipe: str | Recipe, in_axes: int = 1) -> np.ndarray:
    """The float32 values that a weight is rounded to, its `in` axes merged."""
    how = RECIPES[recipe] if isinstance(recipe, str) else recipe
    parts = (packed(weight, how, in_axes), scales_of(weight, how, in_axes))
    return np.asarray(dequantise(QuantisedTensor(*map(jax.numpy.asarray, parts), how.format, how.group)))


def draw(seed: int, *shape: int, dtype=np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@settings(max_examples=25)
@given(
    rows=st.integers(1, 9),
    groups=st.integers(1, 5),
    lead=st.sampled_from([(), (3,)]),
    scale=st.sampled_from([1e-6, 1.0, 1e4]),
    seed=st.integers(0, 99),
)
def test_eight_bits_err_by_half_a_step(rows, groups, lead, scale, seed):
    w = draw(seed, *lead, rows, 32 * groups) * np.float32(scale)
    step = np.abs(w).max(axis=-1, keepdims=True) / 127
    assert np.all(np.abs(rounded(w, "int8") - w) <= 0.5001 * step)
    found = rounded(w, "fp8")  # three bits of mantissa; the smallest step is 2**-9 of the scale
    smallest = np.abs(w).max(axis=-1, keepdims=True) / 448 * 2**-10
    assert np.all(np.abs(found - w) <= np.maximum(np.abs(w) * 2**-4, smallest) * 1.0001)


@settings(max_examples=25)
@given(
    rows=st.integers(1, 9),
    groups=st.integers(1, 5),
    seed=st.integers(0, 99),
    recipe=st.sampled_from(["int4", "int4_64"]),
)
def test_four_bits_err_less_than_rounding_to_the_largest(rows, groups, seed, recipe):
    group = RECIPES[recipe].group
    w = draw(seed, rows, group * groups)
    grid = w.reshape(rows, groups, group)
    plain = np.abs(grid).max(axis=2, keepdims=True) / 7
    error = ((np.rint(grid / plain) * plain - grid) ** 2).sum()
    assert ((rounded(w, recipe) - w) ** 2).sum() <= error * 1.01  # scales are bfloat16


@pytest.mark.parametrize("recipe", RECIPES)
def test_zeros_and_the_grid_itself_come_back_exactly(recipe):
    assert not rounded(np.zeros((3, 64), np.float32), recipe).any()
    w = np.tile(np.arange(-8, 8, dtype=np.float32), (2, 8)) if "int4" in recipe else draw(0, 2, 128)
    once = rounded(w, recipe)
    np.testing.assert_allclose(rounded(once, recipe), once, rtol=1e-6)
    if "int4" in recipe:
        np.testing.assert_array_equal(once, w)


def test_bfloat16_views_of_any_order_are_rounded_as_their_values():
    w = draw(1, 96, 40, dtype=ml_dtypes.bfloat16)
    np.testing.assert_array_equal(
        rounded(w.T[::2], "int4"), rounded(np.ascontiguousarray(w.T[::2], np.float32), "int4")
    )


SPECS = {
    "up": ParamSpec(
        (2, 4, 16, 128),
        None,
        ("layers", "kv_heads", "head_dim", "embed"),
        tuple(Source(f"{i}.up", (i,), lambda w: w.reshape(4, 16, 128)) for i in range(2)),
        in_axes=1,
    ),
    "out": ParamSpec(
        (2, 24, 4, 32),
        None,
        ("layers", "embed", "kv_heads", "head_dim"),
        tuple(Source(f"{i}.out", (i,), lambda w: w.reshape(24, 4, 32)) for i in range(2)),
        in_axes=2,
    ),
    "down": ParamSpec(
        (1, 24, 128), None, ("layers", "embed", "ffn"), (Source("down", (0, slice(None), slice(0, 96))),), in_axes=1
    ),
    "table": ParamSpec((256, 24), None, ("vocab", "embed"), (Source("table", (slice(0, 200),)),), in_axes=1),
    "norm": ParamSpec((24,), "float32", ("norm",), (Source("norm"),)),
}
SPLIT = {"up": (None, "t"), "out": (None, None, "t"), "down": (None, None, "t"), "table": ("t",), "norm": ()}
TENSORS = {
    **{f"{i}.up": draw(2 + i, 64, 128) for i in range(2)},
    **{f"{i}.out": draw(4 + i, 24, 128) for i in range(2)},
    "down": draw(6, 24, 96),
    "table": draw(7, 200, 24),
    "norm": draw(8, 24),
}


def load(tmp_path, devices: int, recipe: str):
    path = tmp_path / "model"
    if not path.exists():
        write_hf_directory(path, TENSORS, {})
    mesh = Mesh(np.array(jax.devices()[:devices]), ("t",))
    shardings = {
        n: NamedSharding(mesh, PartitionSpec(*SPLIT[n], *[None] * (len(s.shape) - len(SPLIT[n]))))
        for n, s in SPECS.items()
    }
    params, _ = load_params(SPECS, open_checkpoint(path), shardings, dtype="bfloat16", quantize=recipe)
    for name, shape in abstract_quantised(SPECS, shardings, recipe).items():
        assert jax.tree.structure(params[name]) == jax.tree.structure(shape)
        for leaf, expected in zip(jax.tree.leaves(params[name]), jax.tree.leaves(shape), strict=True):
            assert (leaf.shape, leaf.dtype, leaf.sharding) == (expected.shape, expected.dtype, expected.sharding)
    return params


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_mesh_holds_the_rounded_rows_of_the_checkpoint(tmp_path, recipe, devices):
    params = load(tmp_path, devices, recipe)
    for value in params.values():
        if isinstance(value, QuantisedTensor):
            value.check()
    found = {n: np.asarray(dequantise(v) if isinstance(v, QuantisedTensor) else v) for n, v in params.items()}
    for i in range(2):
        np.testing.assert_array_equal(found["up"][i].reshape(64, 128), rounded(TENSORS[f"{i}.up"], recipe))
        by_head = TENSORS[f"{i}.out"].reshape(24 * 4, 32) if recipe == "int4_64" else TENSORS[f"{i}.out"]
        np.testing.assert_array_equal(
            found["out"][i].reshape(by_head.shape), rounded(by_head, "int4" if recipe == "int4_64" else recipe)
        )
    short = "int4" if recipe == "int4_64" else recipe  # 96 is not a multiple of 64
    np.testing.assert_array_equal(found["down"][0, :, :96], rounded(TENSORS["down"], short))
    assert not found["down"][0, :, 96:].any()
    np.testing.assert_array_equal(found["table"][:200], rounded(TENSORS["table"], "int8"))
    assert not found["table"][200:].any()
    np.testing.assert_array_equal(found["norm"], TENSORS["norm"])


def test_rows_that_a_shard_cuts_inside_a_word_become_int8(tmp_path):
    specs = {"narrow": ParamSpec((24, 24), None, ("embed", "ffn"), (Source("w"),), in_axes=1)}
    write_hf_directory(tmp_path / "m", {"w": draw(0, 24, 24)}, {})
    mesh = Mesh(np.array(jax.devices()[:2]), ("t",))
    params, _ = load_params(
        specs,
        open_checkpoint(tmp_path / "m"),
        {"narrow": NamedSharding(mesh, PartitionSpec(None, "t"))},
        dtype="float32",
        quantize="int4",
    )
    assert params["narrow"].format == "int8"


def test_an_unknown_recipe_is_refused_by_name():
    with pytest.raises(ConfigError, match="quantize is 'int3'; it must be one of int8, int4"):
        abstract_quantised({}, {}, "int3")

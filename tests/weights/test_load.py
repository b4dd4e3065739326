"""What is loaded equals what a plain numpy assembly gives, under every sharding, staged or not."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trillion_infer.testing.checkpoints import write_hf_directory
from trillion_infer.weights import ParamSpec, Source, init_params, load, load_params, open_checkpoint
from trillion_infer.weights.shards import ALIGNMENT, aligned_zeros

L, OUT, IN = 4, 8, 12


def mesh(shape: tuple[int, int]) -> Mesh:
    count = shape[0] * shape[1]
    if jax.device_count() < count:
        pytest.skip(f"needs {count} devices")
    return Mesh(np.array(jax.devices()[:count]).reshape(shape), ("x", "y"))


def everything() -> tuple[dict[str, np.ndarray], dict[str, ParamSpec], dict[str, np.ndarray]]:
    """Tensors, specs over them with every kind of source, and the values expected."""
    rng = np.random.default_rng(1)
    tensors = {f"l.{i}.w": rng.standard_normal((OUT, IN)).astype(np.float32) for i in range(L)}
    tensors |= {f"l.{i}.n": rng.standard_normal(IN).astype(np.float32) for i in range(L)}
    tensors |= {
        "e": rng.standard_normal((10, IN)).astype(np.float32),
        "g": rng.standard_normal((4, 8)).astype(np.float32),
    }
    stacked = np.stack([tensors[f"l.{i}.w"] for i in range(L)])
    padded = np.zeros((16, IN), np.float32)
    padded[:10] = tensors["e"]
    woven = np.zeros((4, 16), np.float32)
    woven[:, ::2] = tensors["g"]
    specs = {
        "stacked": ParamSpec((L, OUT, IN), None, (None,) * 3, tuple(Source(f"l.{i}.w", (i,)) for i in range(L))),
        "turned": ParamSpec(
            (L, IN, OUT), None, (None,) * 3, tuple(Source(f"l.{i}.w", (i,), np.transpose) for i in range(L))
        ),
        "norms": ParamSpec((L, IN), "float32", (None,) * 2, tuple(Source(f"l.{i}.n", (i,)) for i in range(L))),
        "padded": ParamSpec((16, IN), None, (None,) * 2, (Source("e", (slice(0, 10),)),)),
        "woven": ParamSpec((4, 16), None, (None,) * 2, (Source("g", (slice(None), slice(0, 16, 2))),)),
    }
    expected = {
        "stacked": stacked,
        "turned": stacked.swapaxes(1, 2),
        "norms": np.stack([tensors[f"l.{i}.n"] for i in range(L)]),
        "padded": padded,
        "woven": woven,
    }
    return tensors, specs, expected


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    tensors, specs, expected = everything()
    return open_checkpoint(write_hf_directory(tmp_path_factory.mktemp("all"), tensors, {}, shards=3)), specs, expected


def partition(draw, ndim: int) -> PartitionSpec:
    names = draw(st.permutations([None, "x", "y"]))
    return PartitionSpec(*names[:ndim])


@settings(max_examples=25, deadline=None)
@given(data=st.data(), shape=st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)]))
def test_values_do_not_depend_on_mesh_or_partition(opened, data, shape):
    specs = opened[1]
    devices = mesh(shape)
    shardings = {n: NamedSharding(devices, partition(data.draw, len(s.shape))) for n, s in specs.items()}
    equals_assembly(opened, shardings)


@pytest.mark.parametrize("parts", [(), ("x", "y")])
def test_values_do_not_depend_on_staging(opened, parts):
    specs, devices = opened[1], mesh((1, 2))
    shardings = {n: NamedSharding(devices, PartitionSpec(*parts)) for n in specs}
    equals_assembly(opened, shardings, staged=True)


def equals_assembly(opened, shardings, **options) -> None:
    checkpoint, specs, expected = opened
    arrays, report = load_params(specs, checkpoint, shardings, dtype="float32", **options)
    for name, value in expected.items():
        assert arrays[name].sharding == shardings[name]
        np.testing.assert_array_equal(np.asarray(arrays[name]), value, err_msg=name)
    assert report.missing == report.unexpected == ()


def test_blocks_smaller_than_a_row_give_the_same(opened, monkeypatch):
    checkpoint, specs, expected = opened
    monkeypatch.setattr(load, "BLOCK_BYTES", 20)
    shardings = {n: NamedSharding(mesh((1, 1)), PartitionSpec()) for n in specs}
    arrays, _ = load_params(specs, checkpoint, shardings, dtype="float32")
    for name, value in expected.items():
        np.testing.assert_array_equal(np.asarray(arrays[name]), value, err_msg=name)


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
def test_conversion_rounds_as_a_cast_does(tmp_path, stored, wanted):
    values = np.random.default_rng(2).standard_normal((64, 32)).astype(stored)
    checkpoint = open_checkpoint(write_hf_directory(tmp_path, {"a": values}, {}))
    specs = {"p": ParamSpec((32, 64), None, (None, None), (Source("a", (), np.transpose),))}
    arrays, _ = load_params(specs, checkpoint, {"p": NamedSharding(mesh((1, 1)), PartitionSpec())}, dtype=wanted)
    assert arrays["p"].dtype == jnp.dtype(wanted)
    np.testing.assert_array_equal(np.asarray(arrays["p"]), values.T.astype(jnp.dtype(wanted)))


def test_progress_rises_to_the_total(opened):
    checkpoint, specs, _ = opened
    seen = []
    shardings = {n: NamedSharding(mesh((1, 1)), PartitionSpec()) for n in specs}
    _, report = load_params(
        specs, checkpoint, shardings, dtype="float32", progress=lambda done, total: seen.append((done, total))
    )
    done = [d for d, _ in seen]
    assert done == sorted(done)
    assert done[0] == 0
    assert seen[-1] == (report.bytes, report.bytes)


def test_a_failing_read_stops_the_load_and_is_raised(opened):
    checkpoint, specs, _ = opened

    class Broken:
        def __getattr__(self, name):
            return getattr(checkpoint, name)

        def read(self, name, dtype=None):
            raise OSError("the disk is gone")

    shardings = {n: NamedSharding(mesh((1, 1)), PartitionSpec()) for n in specs}
    with pytest.raises(OSError, match="the disk is gone"):
        load_params(specs, Broken(), shardings, dtype="float32")


def test_an_interrupt_from_progress_stops_the_load(opened):
    checkpoint, specs, _ = opened

    def stop(done, total):
        if done:
            raise KeyboardInterrupt

    shardings = {n: NamedSharding(mesh((1, 1)), PartitionSpec()) for n in specs}
    with pytest.raises(KeyboardInterrupt):
        load_params(specs, checkpoint, shardings, dtype="float32", progress=stop)


def test_cpu_devices_share_the_filled_block():
    block = aligned_zeros((3, 5), np.dtype(np.float32))
    array = jax.device_put(block, jax.devices("cpu")[0])
    assert block.ctypes.data % ALIGNMENT == 0
    assert array.unsafe_buffer_pointer() == block.ctypes.data


@pytest.mark.parametrize("shape", [(2, 2), (1, 4)])
def test_random_models_do_not_depend_on_the_mesh(shape):
    specs = {
        "w": ParamSpec((8, 16), None, (None, None)),
        "v": ParamSpec((8, 16), None, (None, None)),
        "scale": ParamSpec((8,), "float32", (None,), init="ones"),
        "bias": ParamSpec((8,), None, (None,), init="zeros"),
    }
    one = {n: NamedSharding(mesh((1, 1)), PartitionSpec()) for n in specs}
    many = {n: NamedSharding(mesh(shape), PartitionSpec(*("x", "y")[: len(s.shape)])) for n, s in specs.items()}
    first, second = init_params(specs, one, "float32", 3), init_params(specs, many, "float32", 3)
    for name in specs:
        np.testing.assert_array_equal(np.asarray(first[name]), np.asarray(second[name]))
    assert not np.array_equal(np.asarray(first["w"]), np.asarray(first["v"]))
    assert np.all(np.asarray(first["scale"]) == 1)
    assert not np.any(np.asarray(first["bias"]))
    assert 0.01 < np.std(np.asarray(first["w"])) < 0.03

"""Mosaic GPU's prefill, interpreted with a search for races, against dense attention in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.backends import UnsupportedError
from pallas_kernels.ragged_paged_attention import bench, gpu, gpu_hopper
from pallas_kernels.ragged_paged_attention.ahead_of_time import MOSAIC, PREFILL, compile_layers
from pallas_kernels.ragged_paged_attention.arg_specs import SPECS, ArgSpec
from pallas_kernels.ragged_paged_attention.blocks import GpuBlocks, Shape
from pallas_kernels.ragged_paged_attention.report import BY_MOSAIC, REPORT
from sharding.topologies import topology

from . import naive
from .harness import ARRAYS

TRITON = GpuBlocks(keys=32, rows=32, warps=4, stages=2)
LARGE = dataclasses.replace(MOSAIC, keys=128, stages=3)
CASES = {  # the first prefill takes three steps, of which the rows of one warpgroup see the first whole
    "three_steps": (naive.Case(((15, 1), (100, 40)), heads=6, kv_heads=2), MOSAIC),
    "window_and_sinks": (
        naive.Case(((3, 1), (40, 70)), dim=256, page_size=128, sinks=True, options={"window": 20}, kv_heads=1),
        MOSAIC,
    ),
    "short_pages": (
        naive.Case(((0, 3), (130, 9)), heads=40, kv_heads=1, page_size=8, options={"k_scale": 0.5, "v_scale": 2.0}),
        LARGE,
    ),
}
MORE_CASES = {
    "chunk": (naive.Case(((0, 20), (9, 0), (17, 50)), heads=5, kv_heads=1, dim=128, options={"chunk": 32}), MOSAIC),
    "soft_cap": (naive.Case(((0, 70), (200, 70)), heads=2, page_size=256, options={"soft_cap": 3.0}), LARGE),
    "many_heads": (naive.Case(((5, 3), (64, 64)), heads=64, kv_heads=1, page_size=64, dim=128), MOSAIC),
    "one_head_of_many": (naive.Case(((90, 150),), heads=3, kv_heads=3, padded_tokens=40), LARGE),
}


def run(case, sizes=MOSAIC, **changes):
    options = dict.fromkeys(("window", "chunk", "soft_cap", "k_scale", "v_scale", "max_q_len")) | case.options
    batch = naive.build(case)
    arrays = {name: jnp.asarray(batch[name]) for name in ARRAYS}
    sinks = None if batch["sinks"] is None else jnp.asarray(batch["sinks"])
    out, pool = gpu.ragged_paged_attention(**arrays, sinks=sinks, interpret=True, blocks=sizes, **(options | changes))
    return batch, np.asarray(out, np.float64), np.asarray(pool, np.float32)


def small(case):
    return dataclasses.replace(
        case, q_dtype="bfloat16", pool_dtype="bfloat16", options={"scale": case.dim**-0.5, **case.options}
    )


def check(case, sizes):
    case = small(case)
    batch, out, pool = run(case, sizes)
    np.testing.assert_allclose(out, naive.attend(case, batch), atol=2e-2, rtol=2e-2)
    np.testing.assert_array_equal(pool, naive.written(case, batch).astype(np.float32))


@pytest.mark.parametrize("name", CASES)
def test_output_and_pool_match_dense_attention(name):
    check(*CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_CASES)
def test_more_outputs_and_pools_match_dense_attention(name):
    check(*MORE_CASES[name])


def primitives(dtype="bfloat16", max_q_len=None, sizes=None, interpret=False, heads=8, dim=64):
    """Which kernels a call has, as its jaxpr names them."""
    spec = ArgSpec("any", 1, heads, 2, dim, pool_dtype=dtype)
    q, *rest = spec.abstract("gpu", 4, 64, 8)
    options = dict.fromkeys(("window", "chunk", "soft_cap", "sinks", "k_scale", "v_scale")) | {"scale": 0.1}

    def op(*args):
        return gpu.ragged_paged_attention(*args, max_q_len=max_q_len, blocks=sizes, interpret=interpret, **options)

    return str(jax.make_jaxpr(op)(jax.ShapeDtypeStruct(q.shape, dtype), *rest))


@pytest.fixture
def tuned_for_mosaic(monkeypatch):
    """Every shape is one for which Mosaic GPU's prefill was found to be the fastest, on an H100."""
    monkeypatch.setattr(Shape, "measured", lambda *_: dataclasses.asdict(MOSAIC))
    monkeypatch.setattr(gpu_hopper, "device_name", lambda: "h100")


def test_what_was_measured_decides_which_kernel_attends_queries_of_more_than_one_token(tuned_for_mosaic, monkeypatch):
    assert "mpmd_map" in primitives()
    assert "mpmd_map" not in primitives(max_q_len=1)
    monkeypatch.setattr(Shape, "measured", lambda *_: None)
    assert "mpmd_map" not in primitives()


def test_a_measured_choice_that_cannot_run_leaves_prefill_to_triton(tuned_for_mosaic, monkeypatch):
    assert "mpmd_map" not in primitives(max_q_len=16)
    monkeypatch.delattr(plgpu, "InterpretGPUParams")
    assert "mpmd_map" not in primitives()


def test_triton_then_takes_blocks_of_its_own(tuned_for_mosaic, monkeypatch):
    """128 rows of 256 lanes do not fit its shared memory, nor its registers."""
    instead = primitives(max_q_len=16, dim=256)
    monkeypatch.setattr(Shape, "measured", lambda *_: None)
    assert instead == primitives(max_q_len=16, dim=256)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"interpret": False}, "not one of h100, h200"),
        ({"max_q_len": 16}, "16 queries of 4 heads would leave half"),
        ({"dtype": "float32"}, "the pool is float32"),
        ({"sizes": dataclasses.replace(MOSAIC, keys=96)}, "multiples of 64 keys"),
        ({"sizes": dataclasses.replace(MOSAIC, prefill="cuda")}, 'neither "triton" nor "mosaic"'),
        ({"sizes": dataclasses.replace(MOSAIC, stages=16)}, "of which 204800 may be used"),
        ({"heads": 258}, "129"),
    ],
)
def test_blocks_that_were_asked_for_are_refused_where_they_cannot_run(changes, reason):
    with pytest.raises(UnsupportedError, match=reason):
        primitives(**{"sizes": MOSAIC, "interpret": True} | changes)


def test_a_search_leaves_out_a_kernel_that_cannot_run():
    entry = bench.tune(next(bench.tiny_cases()), "gpu", "h100", repeats=1, interpret=True, among=[MOSAIC, TRITON])
    assert entry["blocks"] == dataclasses.asdict(TRITON)


@pytest.mark.parametrize("name", ["llama-3-8b", "gpt-oss-20b-window", "gemma-3-270m", "llama-4-scout"])
def test_a_search_tries_mosaic_for_shapes_that_it_takes(name):
    spec = next(spec for spec in SPECS if spec.name == name)
    tried = bench.candidates(bench.shape_of(spec, "gpu"), "gpu")
    assert "mosaic" in {dataclasses.asdict(blocks)["prefill"] for blocks in tried}


@pytest.mark.aot
@pytest.mark.parametrize("target", ["h100:8", "h200:8"])
@pytest.mark.parametrize("name", [spec.name for spec in SPECS if REPORT.further(spec, "gpu")])
def test_compiles_with_temporaries_below_two_percent_of_the_pool(compiled_row, name, target):
    row = compiled_row("ragged_paged_attention", target, name, BY_MOSAIC)  # a copy of the pool raises
    assert 0 < row.temp_bytes < 0.02 * row.pool_bytes


@pytest.mark.aot
def test_what_compiles_is_the_kernel_of_mosaic():
    spec = ArgSpec("small", 2, 8, 2, 64)
    compiled, _ = compile_layers(spec, dataclasses.replace(PREFILL, blocks=MOSAIC), topology("h100:8")[0], "gpu")
    assert "mosaic_gpu" in (compiled.as_text() or "")

"""The roofline harness runs here, and its count of the fewest bytes and operations is a lower bound."""

import math

import pytest

from pallas_kernels.ragged_paged_attention import bench
from pallas_kernels.ragged_paged_attention.arg_specs import SPECS
from pallas_kernels.ragged_paged_attention.blocks import Shape, gpu_blocks, tpu_blocks
from pallas_kernels.ragged_paged_attention.cost import fewest, gpu_cost, tpu_cost


@pytest.mark.parametrize("backend", ["reference", "tpu", "gpu"])
def test_a_tiny_decode_batch_is_measured(backend):
    case = next(bench.tiny_cases())
    found = bench.measure(case, backend, repeats=1, interpret=True)
    assert 0 < found.bytes_per_second < math.inf


def test_decode_of_one_token_reads_every_key_and_its_own_row_once():
    spec = next(spec for spec in SPECS if spec.name == "llama-3-8b")
    cost = fewest(spec, [(99, 1)])
    row = 2 * 8 * 128 * 2
    assert cost.bytes == 100 * row + row + row + 2 * 32 * 128 * 2
    assert cost.flops == 4 * 100 * 32 * 128


@pytest.mark.parametrize("lens", [[(8191, 1)] * 4, [(1000, 512)]], ids=["decode", "prefill"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_no_kernel_does_less_than_the_fewest(spec, lens):
    shape = Shape(spec.heads, spec.kv_heads, -(-spec.dim // 128) * 128, spec.page_size, spec.pool_dtype)
    least = fewest(spec, lens)
    for cost in (
        tpu_cost(spec, lens, tpu_blocks(shape, spec.max_len // spec.page_size, 512)),
        gpu_cost(spec, lens, gpu_blocks(shape)),
    ):
        assert cost.flops >= least.flops
        assert cost.bytes >= least.bytes

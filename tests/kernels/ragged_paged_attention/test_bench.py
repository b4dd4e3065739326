"""The roofline harness runs here, and its count of the fewest bytes and operations is a lower bound."""

import json
import math

import pytest

from pallas_kernels.common import tuning
from pallas_kernels.common.tuning import add_entry
from pallas_kernels.ragged_paged_attention import bench, blocks
from pallas_kernels.ragged_paged_attention.ahead_of_time import MOSAIC
from pallas_kernels.ragged_paged_attention.arg_specs import SPECS
from pallas_kernels.ragged_paged_attention.bench import Case
from pallas_kernels.ragged_paged_attention.blocks import TpuBlocks, gpu_blocks, tpu_blocks
from pallas_kernels.ragged_paged_attention.cost import fewest, gpu_cost, tpu_cost


@pytest.mark.parametrize("backend", ["reference", "tpu", "gpu"])
def test_a_tiny_decode_batch_is_measured(backend):
    case = next(bench.tiny_cases())
    found = bench.measure(case, backend, repeats=1, interpret=True)
    assert 0 < found.bytes_per_second < math.inf


def test_the_fastest_blocks_are_written_and_found_again(tmp_path, monkeypatch):
    case = Case(bench.TINY, ((5, 9),))
    among = [TpuBlocks(8, 1), TpuBlocks(16, 2)]
    entry = bench.tune(case, "tpu", "v5e", repeats=1, interpret=True, among=among)
    file = tmp_path / "tpu.json"
    file.write_text("[]\n")
    for _ in range(2):
        add_entry(file, entry)
    assert json.loads(file.read_text()) == [entry]
    monkeypatch.setattr(tuning, "_entries", lambda *_: tuple(json.loads(file.read_text())))
    monkeypatch.setattr(blocks, "device_name", lambda: "v5e")
    assert tpu_blocks(bench.shape_of(bench.TINY, "tpu"), 4, 16) in among


@pytest.mark.parametrize("backend", ["tpu", "gpu"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_every_real_shape_has_blocks_to_try(spec, backend):
    shape = bench.shape_of(spec, backend)
    tried = bench.candidates(shape, backend)
    assert len(tried) > 1
    assert all(one.refusal(shape) is None for one in tried)


def test_decode_of_one_token_reads_every_key_and_its_own_row_once():
    spec = next(spec for spec in SPECS if spec.name == "llama-3-8b")
    cost = fewest(spec, [(99, 1)])
    row = 2 * 8 * 128 * 2
    assert cost.bytes == 100 * row + row + row + 2 * 32 * 128 * 2
    assert cost.flops == 4 * 100 * 32 * 128


@pytest.mark.parametrize("lens", [[(8191, 1)] * 4, [(1000, 512)]], ids=["decode", "prefill"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_no_kernel_does_less_than_the_fewest(spec, lens):
    least = fewest(spec, lens)
    for cost in (
        tpu_cost(spec, lens, tpu_blocks(bench.shape_of(spec, "tpu"), spec.max_len // spec.page_size, 512)),
        gpu_cost(spec, lens, gpu_blocks(bench.shape_of(spec, "gpu"))),
        gpu_cost(spec, lens, MOSAIC),
    ):
        assert cost.flops >= least.flops
        assert cost.bytes >= least.bytes

"""What the reports of the products count: right where it can be said by hand, a lower bound elsewhere."""

import pytest

from pallas_kernels.grouped_matmul import cost as grouped
from pallas_kernels.grouped_matmul.arg_specs import SPECS as GROUPED
from pallas_kernels.quantised_matmul import cost as dense
from pallas_kernels.quantised_matmul.arg_specs import SPECS as DENSE


def test_one_token_reads_every_weight_once():
    spec = next(spec for spec in DENSE if spec.name == "llama-3-8b-qkv-int8")
    least = dense.fewest(spec, 1)
    assert least.bytes == 6144 * 4096 + 6144 * 2 + (6144 + 4096) * 2
    assert least.flops == 2 * 6144 * 4096


def test_one_token_reads_the_experts_it_chose_once():
    spec = next(spec for spec in GROUPED if spec.name == "qwen3-30b-a3b")
    least = grouped.fewest(spec, 1)
    assert least.bytes == 8 * 3 * 2048 * 768 * 2 + 2 * 2048 * 2
    assert least.flops == 8 * 2 * 3 * 2048 * 768


@pytest.mark.parametrize("tokens", [1, 64, 512])
@pytest.mark.parametrize(
    ("module", "spec"),
    [*((dense, spec) for spec in DENSE), *((grouped, spec) for spec in GROUPED)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_no_kernel_does_less_than_the_fewest(module, spec, tokens):
    least = module.fewest(spec, tokens)
    for kernel in (module.tpu_cost, module.gpu_cost):
        cost, scratch = kernel(spec, tokens)
        assert cost.flops >= least.flops
        assert cost.bytes >= least.bytes
        assert scratch > 0

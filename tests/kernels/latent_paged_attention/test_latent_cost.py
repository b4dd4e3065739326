"""The count of the fewest bytes and operations is right where it can be said by hand, and a lower bound elsewhere."""

import pytest

from pallas_kernels.latent_paged_attention.arg_specs import SPECS
from pallas_kernels.latent_paged_attention.blocks import gpu_blocks, tpu_blocks
from pallas_kernels.latent_paged_attention.cost import fewest, gpu_cost, shape_of, tpu_cost


def test_decode_of_one_token_reads_every_latent_once_for_all_heads():
    spec = next(spec for spec in SPECS if spec.name == "kimi-k2.5")
    cost = fewest(spec, [(99, 1)])
    row = 576 * 2
    assert cost.bytes == 100 * row + row + row + 64 * (576 + 512) * 2
    assert cost.flops == 2 * 100 * 64 * (576 + 512)


@pytest.mark.parametrize("lens", [[(8191, 1)] * 4, [(1000, 512)]], ids=["decode", "prefill"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_no_kernel_does_less_than_the_fewest(spec, lens):
    least = fewest(spec, lens)
    for cost in (
        tpu_cost(spec, lens, tpu_blocks(shape_of(spec, "tpu"), spec.max_len // spec.page_size)),
        gpu_cost(spec, lens, gpu_blocks(shape_of(spec, "gpu"))),
    ):
        assert cost.flops >= least.flops
        assert cost.bytes >= least.bytes

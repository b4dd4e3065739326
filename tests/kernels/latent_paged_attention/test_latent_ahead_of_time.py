"""Every real shape compiles for every target with the real compilers, and holds no second pool."""

import pytest

from pallas_kernels.latent_paged_attention.ahead_of_time import DECODE, PREFILL, Batch
from pallas_kernels.latent_paged_attention.arg_specs import SPECS, ArgSpec
from pallas_kernels.latent_paged_attention.blocks import tpu_blocks
from pallas_kernels.latent_paged_attention.cost import shape_of
from sharding.topologies import EVERY_KIND

BUCKETS = {"decode": DECODE, "prefill": PREFILL}


def held_bytes(spec: ArgSpec, target: str, batch: Batch) -> int:
    """What a step has beside its arguments: queries in their blocks, as gathered and as wide as a row of the pool, and
    results in blocks and twice in the tokens' order. A block of a TPU has room for several queries of one sequence, of
    which each sequence's last one may be almost empty."""
    rows = batch.tokens
    if batch is PREFILL and not target.startswith("h"):
        shape = shape_of(spec, "tpu")
        rows += batch.sequences * (tpu_blocks(shape, spec.max_len // spec.page_size).queries(shape) - 1)
    width, result = -(-(spec.rank + spec.rope) // 128) * 128, spec.rank * (2 if spec.shards == 1 else 4)
    return spec.heads * (rows * (2 * 2 * width + result) + 2 * batch.tokens * result)


@pytest.mark.aot
@pytest.mark.parametrize("batch", BUCKETS)
@pytest.mark.parametrize("target", EVERY_KIND)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_it_compiles_with_temporaries_of_the_size_of_its_queries(compiled_row, spec, target, batch):
    row = compiled_row("latent_paged_attention", target, spec.name, batch)  # a copy of the pool raises
    assert row.temp_bytes < held_bytes(spec, target, BUCKETS[batch]) + (32 << 20)
    assert row.temp_bytes < 0.05 * row.pool_bytes  # of 8 GiB, whatever the device

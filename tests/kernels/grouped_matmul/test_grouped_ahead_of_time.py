"""Every real shape compiles for every target with the real compilers, and copies no stack of experts."""

import pytest

from pallas_kernels.grouped_matmul.ahead_of_time import TOKENS
from pallas_kernels.grouped_matmul.arg_specs import SPECS
from sharding.topologies import EVERY_KIND


@pytest.mark.aot
@pytest.mark.parametrize("batch", TOKENS)
@pytest.mark.parametrize("target", EVERY_KIND)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_it_compiles_and_holds_little_beside_the_rows_of_its_tokens(compiled_row, spec, target, batch):
    row = compiled_row("grouped_matmul", target, spec.name, batch)
    rows = TOKENS[batch] * spec.choices * (3 * spec.model + 2 * spec.ffn) * 2
    assert row.temp_bytes < 2 * rows + (8 << 20)

"""Every real shape compiles for every target with the real compilers, and copies no stack of weights."""

import pytest

from pallas_kernels.quantised_matmul.ahead_of_time import TOKENS
from pallas_kernels.quantised_matmul.arg_specs import SPECS
from sharding.topologies import EVERY_KIND


@pytest.mark.aot
@pytest.mark.parametrize("batch", TOKENS)
@pytest.mark.parametrize("target", EVERY_KIND)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_it_compiles_and_holds_little_beside_its_activations(compiled_row, spec, target, batch):
    row = compiled_row("quantised_matmul", target, spec.name, batch)
    activations = TOKENS[batch] * (spec.n_in + spec.n_out) * 2
    assert row.temp_bytes < 2 * activations + (1 << 20)

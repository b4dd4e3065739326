"""Every real shape compiles for every target with the real compilers, and copies no stack of weights."""

import pytest

from pallas_kernels.quantised_matmul.ahead_of_time import TOKENS, compile_layer
from pallas_kernels.quantised_matmul.arg_specs import SPECS
from sharding.topologies import topology

TARGETS = {
    "v5e:2x2": "tpu",
    "v5p:2x2x1": "tpu",
    "v6e:2x2": "tpu",
    "tpu7x:2x2x1": "tpu",
    "h100:8": "gpu",
    "h200:8": "gpu",
}


@pytest.mark.aot
@pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_it_compiles_and_holds_little_beside_its_activations(spec, target, tokens):
    compiled = compile_layer(spec, tokens, topology(target)[0], TARGETS[target])
    activations = tokens * (spec.n_in + spec.n_out) * 2
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * activations + (1 << 20)

"""What is declared apart from the modules is what they hold."""

import pytest

from trillion_infer.layers.decoder import Decoder
from trillion_infer.layers.parameters import param_specs
from trillion_infer.models import read_family
from trillion_infer.params.decoder import decoder_params
from trillion_infer.params.tree import flat
from trillion_infer.testing.tiny_models import tiny_config

SIZES = [
    {"data": 1, "stage": 1, "sequence": 1, "expert": 1, "tensor": 1},
    {"data": 1, "stage": 2, "sequence": 1, "expert": 2, "tensor": 2},
]


@pytest.mark.parametrize("sizes", SIZES, ids=["alone", "split"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek", "gpt_oss", "llama4"])
def test_a_decoder_holds_every_parameter_that_is_declared(family, sizes):
    model = read_family(tiny_config(family))
    declared = flat(decoder_params(model.config, model.names, sizes))
    held = param_specs(Decoder(model.config, model.names, sizes))
    assert held.keys() == declared.keys()
    for name, spec in held.items():
        assert (spec.shape, spec.axes, spec.dtype) == (declared[name].shape, declared[name].axes, declared[name].dtype)

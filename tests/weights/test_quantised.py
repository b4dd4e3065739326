"""Quantised checkpoints read as the values that they stand for, and load packed to tensors of the same values."""

import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.quantised_matmul import QuantisedTensor, dequantise
from trillion_infer.core.errors import ModelLoadError, UnsupportedModelError
from trillion_infer.testing.checkpoints import write_hf_directory
from trillion_infer.weights import ParamSpec, Source, load_params, open_checkpoint
from trillion_infer.weights.quant_config import ignored, read_quantisation
from trillion_infer.weights.quant_formats import Fp8, Int4, Mxfp4
from trillion_infer.weights.safetensors_file import SafetensorsFile

GOLDEN = Path(__file__).parents[1] / "oracle" / "golden"
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*"],
    "config_groups": {
        "group_0": {"weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}}
    },
}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
FORMATS = [
    ("int4_g32", Int4(32), "weight_packed", "weight_scale"),
    ("fp8_block", Fp8(128), "weight", "weight_scale_inv"),
    ("mxfp4_gpt_oss", Mxfp4(32), "blocks", "scales"),
]


@pytest.mark.parametrize(("file", "format", "packed", "scale"), FORMATS, ids=lambda x: x if isinstance(x, str) else "")
def test_decoding_equals_the_reference(file, format, packed, scale):
    opened = SafetensorsFile(GOLDEN / "formats" / f"{file}.safetensors")
    stored = {name: opened.read(name) for name in opened.names()}
    rows = stored["value"].shape[-2]
    decoded = format.decode(format.packed(stored[packed]), format.row_scales(stored[scale], rows))
    np.testing.assert_array_equal(decoded, stored["value"])


@pytest.mark.parametrize("name", ["kimi_k25", "deepseek_v3_fp8", "gpt_oss_mxfp4"])
def test_only_weights_are_listed(name):
    names = open_checkpoint(GOLDEN / "tiny" / name).names()
    assert not [n for n in names if n.endswith(("_packed", "_scale", "_shape", "_scale_inv", "_blocks", "_scales"))]
    assert len(set(names)) == len(names)


def test_mxfp4_has_the_shapes_of_its_plain_twin():
    plain, packed = (open_checkpoint(GOLDEN / "tiny" / n) for n in ("gpt_oss", "gpt_oss_mxfp4"))
    assert set(plain.names()) == set(packed.names())
    for name in plain.names():
        assert plain.shape(name) == packed.shape(name)
        np.testing.assert_array_equal(plain.read(name).astype(np.float32), packed.read(name).astype(np.float32))


def transposed(w):
    return w.swapaxes(-1, -2)


CASES = {
    "kimi_k25": lambda c: {
        "experts": ParamSpec(
            (2, 2, 32, 64),
            None,
            (None,) * 4,
            tuple(
                Source(f"language_model.model.layers.1.mlp.experts.{e}.{p}_proj.weight", (e, i))
                for e in range(2)
                for i, p in enumerate(("gate", "up"))
            ),
        )
    },
    "deepseek_v3_fp8": lambda c: {
        "down": ParamSpec(
            (2, 160, 64),
            None,
            (None,) * 3,
            tuple(Source(f"model.layers.1.mlp.experts.{e}.down_proj.weight", (e,)) for e in range(2)),
        ),
        "half": ParamSpec(
            (72, 160),
            None,
            (None,) * 2,
            (Source("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", (), lambda w: w[::2]),),
        ),
    },
    "gpt_oss_mxfp4": lambda c: {
        "gate": ParamSpec(
            (1, 4, 32, 64),
            None,
            (None,) * 4,
            (Source("model.layers.0.mlp.experts.gate_up_proj", (0,), lambda w: transposed(w)[:, ::2]),),
        )
    },
}


@pytest.mark.parametrize("shards", [(1, 1), (2, 1), (1, 2), (1, 4), (2, 4)])
@pytest.mark.parametrize("name", CASES)
def test_kept_tensors_have_the_values_of_decoded_ones(name, shards):
    checkpoint = open_checkpoint(GOLDEN / "tiny" / name)
    specs = CASES[name](checkpoint)
    if jax.device_count() < shards[0] * shards[1]:
        pytest.skip("needs more devices")
    mesh = Mesh(np.array(jax.devices()[: shards[0] * shards[1]]).reshape(shards), ("out", "in"))
    shardings = {
        n: NamedSharding(mesh, PartitionSpec(*[None] * (len(s.shape) - 2), "out", "in")) for n, s in specs.items()
    }
    options = {"dtype": "float32", "ignore": [".*"]}
    decoded, _ = load_params(specs, checkpoint, shardings, **options)
    kept, report = load_params(specs, checkpoint, shardings, keep_quantised=True, **options)
    for param, value in decoded.items():
        assert isinstance(kept[param], QuantisedTensor), param
        kept[param].check()
        assert kept[param].packed.sharding == shardings[param]
        np.testing.assert_array_equal(np.asarray(dequantise(kept[param])), np.asarray(value), err_msg=param)
    assert report.bytes < sum(v.nbytes for v in decoded.values())


def test_a_transform_that_mixes_columns_is_decoded():
    checkpoint = open_checkpoint(GOLDEN / "tiny" / "kimi_k25")
    source = Source("language_model.model.layers.1.mlp.experts.0.gate_proj.weight", (), transposed)
    specs = {"turned": ParamSpec((64, 32), None, (None, None), (source,))}
    sharding = {"turned": jax.sharding.SingleDeviceSharding(jax.devices()[0])}
    kept, _ = load_params(specs, checkpoint, sharding, dtype="bfloat16", ignore=[".*"], keep_quantised=True)
    expected = checkpoint.read(source.name).T.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(kept["turned"]), expected)


def test_rows_decode_as_rows_of_the_whole():
    checkpoint = open_checkpoint(GOLDEN / "tiny" / "deepseek_v3_fp8")
    name = "model.layers.0.mlp.gate_proj.weight"
    out = np.empty((9, 160), np.float32)
    checkpoint.decode(name, slice(125, 134), out)
    np.testing.assert_array_equal(out, checkpoint.read(name)[125:134])


@pytest.mark.parametrize(
    ("module", "named"),
    [
        ("lm_head", True),
        ("language_model.lm_head", True),
        ("my_lm_head", False),
        ("model.layers.0.self_attn.q_proj", True),
        ("model.layers.0.mlp.experts.0.gate_proj", False),
    ],
)
def test_ignore_entries_are_literal_or_expressions(module, named):
    assert ignored(module, INT4["ignore"]) is named


def test_a_packed_module_that_the_ignore_list_names_is_a_contradiction(tmp_path):
    tensors = {
        "a.self_attn.q.weight_packed": np.zeros((4, 4), np.int32),
        "a.self_attn.q.weight_scale": np.ones((4, 1), np.float32),
    }
    with pytest.raises(ModelLoadError, match=r"weight_packed is quantised, but .* ignore list names a\.self_attn\.q"):
        open_checkpoint(write_hf_directory(tmp_path, tensors, {"quantization_config": INT4}))


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        (FP8, {"w_scale_inv": np.ones((1, 1), np.float32)}, "w_scale_inv has no w"),
        (INT4, {"w_packed": np.zeros((4, 4), np.int32)}, "w_packed has no scales"),
        (
            INT4,
            {"w_packed": np.zeros((4, 4), np.int32), "w_scale": np.ones((4, 2), np.float32)},
            r"w_packed of shape \(4, 4\) has scales of shape \(4, 2\)",
        ),
    ],
)
def test_parts_that_do_not_belong_together_are_named(tmp_path, config, tensors, message):
    with pytest.raises(ModelLoadError, match=message):
        open_checkpoint(write_hf_directory(tmp_path, tensors, {"quantization_config": config}))


@pytest.mark.parametrize(
    ("quant", "message"),
    [
        ({"quant_method": "awq", "bits": 4}, "'awq'"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "weight_block_size None"),
        ({**INT4, "format": "float-quantized"}, "'float-quantized'"),
        (json.loads(json.dumps(INT4).replace('"symmetric": true', '"symmetric": false')), "symmetric=False"),
        (json.loads(json.dumps(INT4).replace('"num_bits": 4', '"num_bits": 8')), "num_bits=8"),
    ],
)
def test_unknown_quantisation_is_refused_by_name(quant, message):
    with pytest.raises(UnsupportedModelError, match=message):
        read_quantisation({"text_config": {"quantization_config": quant}})

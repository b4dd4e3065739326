"""Blocks of a GGUF that stay packed stand for exactly the values that decoding gives."""

import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from pallas_kernels.quantised_matmul import QuantisedTensor, dequantise
from sharding.mesh import make_mesh
from trillion_infer.config.engine import EngineConfig
from trillion_infer.core.errors import ConfigError
from trillion_infer.engine.build import plan_engine
from trillion_infer.models import read_family
from trillion_infer.testing.checkpoints import write_gguf
from trillion_infer.weights import load_params, open_checkpoint
from trillion_infer.weights.gguf_packed import abstract_blocks
from trillion_infer.weights.packing import choose_packing

M, F, V, D, H, K = 256, 512, 64, 64, 4, 2
METADATA = {
    "block_count": 2,
    "embedding_length": M,
    "feed_forward_length": F,
    "context_length": 128,
    "attention.head_count": H,
    "attention.head_count_kv": K,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.dimension_count": D,
    "vocab_size": V,
}
SHAPES = {
    "attn_q": (H * D, M),
    "attn_k": (K * D, M),
    "attn_v": (K * D, M),
    "attn_output": (M, H * D),
    "ffn_gate": (F, M),
    "ffn_up": (F, M),
    "ffn_down": (M, F),
}


def write(path, types: dict[str, Q]):
    """A llama whose matrices have these types (by the last part of their name; else Q8_0)."""
    rng = np.random.default_rng(0)
    tensors = {"token_embd.weight": (V, M), "output_norm.weight": (M,)}
    for layer in range(2):
        tensors |= {f"blk.{layer}.{name}.weight": (M,) for name in ("attn_norm", "ffn_norm")}
        tensors |= {f"blk.{layer}.{name}.weight": shape for name, shape in SHAPES.items()}
    values = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in tensors.items()}
    kinds = {n: types.get(n.split(".")[-2], types.get("*", Q.Q8_0)) for n, v in values.items() if v.ndim == 2}
    return open_checkpoint(write_gguf(path / "m.gguf", values, "llama", METADATA, qtypes=kinds))


def load(checkpoint, mesh: str | None, **options):
    family = read_family(checkpoint.config, {})
    blueprint = plan_engine(family, make_mesh(mesh), EngineConfig(dtype="float32", max_model_len=64))
    specs, shardings = blueprint.specs, blueprint.shardings
    params, _ = load_params(specs, checkpoint, shardings, dtype="float32", tied={"lm_head.weight": "x"}, **options)
    return specs, shardings, params


@pytest.mark.parametrize("mesh", [None, "tensor=2"])
@pytest.mark.parametrize("kind", [Q.Q8_0, Q.Q4_0, Q.Q4_1])
def test_kept_blocks_have_the_values_of_decoded_ones(tmp_path, kind, mesh):
    checkpoint = write(tmp_path, {"*": kind})
    _, _, decoded = load(checkpoint, mesh)
    specs, shardings, kept = load(checkpoint, mesh, keep_quantised=True)
    packed = {name for name, value in kept.items() if isinstance(value, QuantisedTensor)}
    assert packed == {name for name, spec in specs.items() if spec.in_axes}
    for name in packed:
        kept[name].check()
        assert kept[name].format == kind.name.lower()
        found = np.asarray(dequantise(kept[name])).reshape(decoded[name].shape)
        np.testing.assert_array_equal(found, np.asarray(decoded[name]), err_msg=name)
    abstract = abstract_blocks(specs, shardings, checkpoint)
    assert set(abstract) == packed
    for name, shape in abstract.items():
        for leaf, expected in zip(jax.tree.leaves(kept[name]), jax.tree.leaves(shape), strict=True):
            assert (leaf.shape, leaf.dtype, leaf.sharding) == (expected.shape, expected.dtype, expected.sharding)


def test_mixed_types_are_decoded_parameter_by_parameter(tmp_path):
    _, _, kept = load(write(tmp_path, {"attn_v": Q.Q5_0, "ffn_down": Q.Q4_0}), None, keep_quantised=True)
    formats = {n.split(".")[-1]: v.format for n, v in kept.items() if isinstance(v, QuantisedTensor)}
    assert formats == {"table": "q8_0", "out": "q8_0", "gate_up": "q8_0", "down": "q4_0"}


def test_a_shard_that_would_cut_a_block_has_the_weight_decoded(tmp_path):
    """Rows of 256 over 16 devices' worth of heads cannot be had here; of 64 (a block is 32) over 4 heads they can."""
    checkpoint = write(tmp_path, {})
    _, _, kept = load(checkpoint, "tensor=8", keep_quantised=True)
    assert isinstance(kept["segments.0.0.ffn.down"], QuantisedTensor)  # 512 / 8 = 64
    assert not isinstance(kept["segments.0.0.mixer.out"], QuantisedTensor)  # heads are laid out anew


def test_keep_is_refused_where_there_is_nothing_to_multiply_it_with(tmp_path):
    checkpoint = write(tmp_path, {})
    with pytest.raises(ConfigError, match="multiplied on CPUs only, not on a tpu"):
        choose_packing(checkpoint, "keep", "tpu")

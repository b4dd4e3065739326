"""Experts stay packed in device memory: the same tokens, and the shapes that a config alone foretells."""

import jax
import numpy as np
import pytest

from pallas_kernels.quantised_matmul.formats import QuantisedTensor
from sharding.mesh import make_mesh
from tests.conftest import GOLDEN
from tests.engine.helpers import greedy, tokens_of
from trillion_infer.config.engine import EngineConfig
from trillion_infer.engine.build import plan_engine
from trillion_infer.models import read_family
from trillion_infer.weights.checkpoint import open_checkpoint
from trillion_infer.weights.quant_config import read_quantisation
from trillion_infer.weights.quant_load import abstract_described, abstract_kept, routed_experts

PACKED = {"kimi_k25": "int4", "deepseek_v3_fp8": "fp8", "gpt_oss_mxfp4": "mxfp4"}


@pytest.mark.parametrize("name", PACKED)
def test_packed_experts_give_the_tokens_of_transformers(make_llm, name):
    """W4A16 in float32 activations is the dequantised model."""
    llm = make_llm(name, prefill_chunk=16, page_size=8)
    held = {n: p for n, p in llm.blueprint.abstract_params.items() if isinstance(p, QuantisedTensor)}
    assert {p.format for p in held.values()} == {PACKED[name]}
    assert {n.rpartition(".")[2] for n in held} == {"gate_up", "down"}
    golden = np.load(GOLDEN / "tiny" / name / "golden.npz")
    prompts = [golden[f"prompt_{i}"].tolist() for i in range(3)]
    lengths = [min(48, llm.max_model_len - len(prompt)) for prompt in prompts]
    found = tokens_of(llm.generate(prompts, [greedy(n) for n in lengths]))
    assert found == [golden[f"tokens_{i}"][:n].tolist() for i, n in enumerate(lengths)]


@pytest.mark.parametrize("mesh", ["", "expert=2,tensor=2"])
@pytest.mark.parametrize("name", PACKED)
def test_the_config_alone_foretells_what_the_checkpoint_gives(name, mesh):
    """Names, formats, groups, shapes, dtypes and shardings of packed weights."""
    checkpoint = open_checkpoint(GOLDEN / "tiny" / name)
    blueprint = plan_engine(read_family(checkpoint.config), make_mesh(mesh), EngineConfig(dtype="bfloat16"))
    specs, shardings = blueprint.specs, blueprint.shardings
    kept = abstract_kept(specs, shardings, checkpoint, routed_experts)
    described = abstract_described(specs, shardings, *read_quantisation(checkpoint.config), routed_experts)
    assert kept
    assert jax.tree.structure(described) == jax.tree.structure(kept)
    for ours, theirs in zip(jax.tree.leaves(described), jax.tree.leaves(kept), strict=True):
        assert (ours.shape, ours.sharding) == (theirs.shape, theirs.sharding)
        assert ours.dtype == theirs.dtype or {ours.dtype.name, theirs.dtype.name} == {"bfloat16", "float32"}

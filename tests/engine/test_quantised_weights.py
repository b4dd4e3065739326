"""Weights rounded at load: the engine computes what it would with the values they stand for, on every mesh."""

import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests.conftest import GOLDEN
from tests.engine.helpers import greedy, tokens_of
from tests.engine.test_equalities import prompts_of
from tests.weights.test_quantise import rounded
from trillion_infer.core.errors import ConfigError
from trillion_infer.testing.checkpoints import write_hf_directory
from trillion_infer.weights import open_checkpoint
from trillion_infer.weights.checkpoint import read_json
from trillion_infer.weights.rounding import Recipe

pytestmark = pytest.mark.matrix

SMALL = {"page_size": 8, "prefill_chunk": 16, "precompile": False}
PROMPTS = prompts_of(5, [3, 20, 40])
HEAD_DIMS = {"smollm2": 8, "qwen3_moe": 16, "deepseek_v3": 12}
PLAIN = ("norm", "mlp.gate.", "kv_b_proj", "bias")


@pytest.fixture(scope="session")
def twin(tmp_path_factory):
    """twin(model, recipe) -> directory of a checkpoint that holds the values which the recipe rounds to."""
    made = {}

    def make(name: str, recipe: str):
        if (name, recipe) not in made:
            stored = open_checkpoint(GOLDEN / "tiny" / name)
            tensors = {n: np.asarray(stored.read(n), np.float32) for n in stored.names()}
            path = tmp_path_factory.mktemp(f"{name}-{recipe}")
            config = read_json(GOLDEN / "tiny" / name / "config.json")
            made[name, recipe] = write_hf_directory(
                path, {n: round_tensor(n, w, recipe, HEAD_DIMS[name]) for n, w in tensors.items()}, config
            )
        return made[name, recipe]

    return make


def round_tensor(name: str, w: np.ndarray, recipe: str, head_dim: int) -> np.ndarray:
    """By the documented rules: tables and rows of part words are int8; groups do not cross heads or a row."""
    if w.ndim < 2 or any(part in name for part in PLAIN):
        return w
    if "embed_tokens" in name or "lm_head" in name:
        return rounded(w, "int8")
    if not recipe.startswith("int4"):
        return rounded(w, recipe)
    group = np.gcd.reduce([32, w.shape[1], *([head_dim] if "o_proj" in name else [])])
    return rounded(w, Recipe("int4_affine", int(group)) if group % 8 == 0 else "int8")


def scores(output) -> list[float]:
    logprobs = [next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]]
    return logprobs + [
        entry[t].logprob for entry, t in zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True)
    ]


@pytest.mark.parametrize("recipe", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("name", ["smollm2", "qwen3_moe", "deepseek_v3"])
def test_rounded_weights_compute_as_their_dequantised_twin(make_llm, twin, name, recipe):
    packed, plain = make_llm(name, **SMALL, quantize=recipe), make_llm(twin(name, recipe), **SMALL)
    params = greedy(12, logprobs=0, prompt_logprobs=0)
    found, expected = packed.generate(PROMPTS, params), plain.generate(PROMPTS, params)
    assert tokens_of(found) == tokens_of(expected)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(scores(a), scores(b), atol=2e-5)
    most = {"int8": 0.32, "fp8": 0.32, "int4": 0.26}[recipe] + (0.1 if name == "deepseek_v3" else 0)
    assert packed.memory()["weights"] < most * plain.memory()["weights"]


@pytest.mark.parametrize(
    ("name", "mesh", "recipe"),
    [
        ("smollm2", "tensor=2", "int4"),
        ("smollm2", "tensor=4", "int4"),
        ("smollm2", "tensor=4", "int8"),
        ("deepseek_v3", "tensor=2", "int8"),
        ("deepseek_v3", "expert=2,tensor=2", "int8"),
    ],
)
def test_rounded_weights_on_a_mesh_equal_one_device(make_llm, name, mesh, recipe):
    one, many = make_llm(name, **SMALL, quantize=recipe), make_llm(name, **SMALL, quantize=recipe, mesh=mesh)
    assert tokens_of(many.generate(PROMPTS, greedy())) == tokens_of(one.generate(PROMPTS, greedy()))


def test_a_converted_checkpoint_keeps_its_rounded_weights(make_llm, tmp_path):
    target = tmp_path / "smollm2.orbax"
    command = [sys.executable, "scripts/convert.py", f"--model={GOLDEN / 'tiny' / 'smollm2'}", f"--output={target}"]
    subprocess.run([*command, "--dtype=float32", "--quantize=int4", "--mesh=tensor=2"], check=True, timeout=300)
    rounded_now, converted = (
        make_llm(m, **SMALL, **o, mesh="tensor=2") for m, o in (("smollm2", {"quantize": "int4"}), (target, {}))
    )
    assert converted.memory()["weights"] == rounded_now.memory()["weights"]
    assert tokens_of(converted.generate(PROMPTS, greedy())) == tokens_of(rounded_now.generate(PROMPTS, greedy()))
    with pytest.raises(ConfigError, match="in final layout"):
        make_llm.fresh(target, quantize="int8")
    shutil.rmtree(target)


@pytest.mark.parametrize(
    ("name", "recipe", "message"),
    [
        ("kimi_k25", "int8", "holds int4 weights"),
        ("gpt_oss_mxfp4", "fp8", "holds mxfp4 weights"),
        ("smollm2", "int5", "quantize is 'int5'; it must be one of"),
    ],
)
def test_what_cannot_be_rounded_is_refused_before_loading(make_llm, name, recipe, message):
    with pytest.raises(ConfigError, match=message):
        make_llm.fresh(name, quantize=recipe)

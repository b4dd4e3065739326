"""Hugging Face directories: config.json beside one safetensors file, or several with an index."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trillion_infer.core.errors import ModelLoadError
from trillion_infer.weights.cast import copy_into
from trillion_infer.weights.checkpoint import Checkpoint, digest, read_json
from trillion_infer.weights.quant_checkpoint import QuantisedCheckpoint
from trillion_infer.weights.quant_config import read_quantisation
from trillion_infer.weights.safetensors_file import SafetensorsFile

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def open_hf_directory(path: Path) -> Checkpoint:
    """The checkpoint in `path`, its weights decoded when read if its config says that they are quantised.

    Raises UnsupportedModelError, by name, for a quantisation that is not implemented.
    """
    stored = HFDirectory(path)
    format, plain = read_quantisation(stored.config)
    return stored if format is None else QuantisedCheckpoint(stored, format, plain)


class HFDirectory:
    """A checkpoint of mapped safetensors files. Only the files that the index names are opened."""

    def __init__(self, path: Path):
        self.path = path
        self.config: dict[str, Any] = read_json(path / "config.json")
        generation = path / "generation_config.json"
        self.generation_config: dict[str, Any] = read_json(generation) if generation.exists() else {}
        self._files, self._where = _open_files(path)

    def decoded(self, name: str) -> bool:
        return False

    def names(self) -> Sequence[str]:
        return list(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file(name).entry(name).shape

    def dtype(self, name: str) -> np.dtype:
        return self._file(name).entry(name).dtype

    def nbytes(self, name: str) -> int:
        entry = self._file(name).entry(name)
        return entry.end - entry.begin

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        return self._file(name).read(name)

    def decode(self, name: str, rows: slice, out: np.ndarray) -> None:
        copy_into(out, self.read(name)[rows])

    def release(self, name: str) -> None:
        self._file(name).release(name)

    def fingerprint(self) -> bytes:
        rows = []
        for name, file in self._where.items():
            entry = self._files[file].entry(name)
            rows.append((name, entry.shape, entry.dtype.name, file, entry.begin))
        return digest(self.config, rows, [f.mapped.bytes for f in self._files.values()])

    def _file(self, name: str) -> SafetensorsFile:
        return self._files[self._where[name]]


def _open_files(path: Path) -> tuple[dict[str, SafetensorsFile], dict[str, str]]:
    """Opened files by file name, and the file name of each tensor in file order."""
    index = path / INDEX
    if not index.exists():
        file = SafetensorsFile(_single_file(path))
        return {file.path.name: file}, dict.fromkeys(file.names(), file.path.name)

    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise ModelLoadError(f"{index} has no 'weight_map' from tensor names to file names; fetch the file again")
    shards = sorted(set(weight_map.values()))
    outside = [s for s in shards if Path(s).name != s]
    if outside:
        raise ModelLoadError(f"{index} names files outside its own directory: {', '.join(outside)}")
    absent = [s for s in shards if not (path / s).exists()]
    if absent:
        raise ModelLoadError(
            f"{len(absent)} of the {len(shards)} files that {INDEX} names are missing in {path}: {', '.join(absent)}; "
            "the download is probably incomplete, fetch these files again"
        )
    files = {s: SafetensorsFile(path / s) for s in shards}
    astray = [f"{name} ({shard})" for name, shard in weight_map.items() if name not in files[shard]]
    if astray:
        raise ModelLoadError(
            f"{len(astray)} tensors are not in the file that {INDEX} names for them: {', '.join(sorted(astray))}; "
            "index and files are of different versions, fetch both again"
        )
    where = {n: s for s in shards for n in files[s].names() if weight_map.get(n) == s}
    return files, where


def _single_file(path: Path) -> Path:
    if (path / SINGLE).exists():
        return path / SINGLE
    found = sorted(path.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        raise ModelLoadError(
            f"{path} holds {len(found)} safetensors files but no {INDEX} that says which belong together; "
            "the download is probably incomplete, fetch the index"
        )
    if any(path.glob("*.bin")):
        raise ModelLoadError(
            f"{path} holds pickled weights (*.bin) only, which are not read; convert them to safetensors"
        )
    raise ModelLoadError(f"{path} has config.json but no *.safetensors file; the download is probably incomplete")

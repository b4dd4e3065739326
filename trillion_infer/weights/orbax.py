"""Checkpoints in final layout: parameters as the engine holds them, written and read by Orbax.

A directory has `params/` (Orbax's own), the source's config and tokenizer files, and `layout.json`, which is written
last: a directory without it is an unfinished conversion. Reading transforms nothing, whatever the mesh.
"""

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from pallas_kernels.quantised_matmul.formats import QuantisedTensor, abstract
from trillion_infer.core.errors import ModelLoadError
from trillion_infer.weights.checkpoint import Checkpoint, read_json
from trillion_infer.weights.quant_load import first_axes
from trillion_infer.weights.report import LoadReport, Progress
from trillion_infer.weights.spec import ParamSpec

LAYOUT, PARAMS, VERSION = "layout.json", "params", 1
_TEXT_FILES = ("tokenizer*", "*.jinja", "special_tokens_map.json", "vocab.json", "merges.txt", "chat_template.json")


def save_final_layout(path: Path, params: Mapping[str, Any], source: Checkpoint, dtype: Any) -> None:
    """Writes `params` (arrays and QuantisedTensors, on any mesh) to the directory `path`.

    An unfinished conversion at `path` is replaced; anything else there raises ModelLoadError.
    """
    import orbax.checkpoint as ocp

    path = path.absolute()
    unfinished = (path / PARAMS).is_dir() and not (path / LAYOUT).exists()
    if path.exists() and not unfinished and any(path.iterdir()):
        raise ModelLoadError(f"{path} already holds something; give a new directory")
    path.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / PARAMS, {n: _leaves(p) for n, p in params.items()}, force=True)
        checkpointer.wait_until_finished()
    if jax.process_index() == 0:
        _write_beside(path, params, source, dtype)


class OrbaxCheckpoint:
    """A directory that `save_final_layout` wrote. Its tensors are parameters, not those of the source.

    Raises ModelLoadError when a file is missing or of another length than when it was written.
    """

    def __init__(self, path: Path):
        self.path = path
        self._layout = read_json(path / LAYOUT)
        if self._layout.get("version") != VERSION:
            raise ModelLoadError(
                f"{path} has layout version {self._layout.get('version')}, expected {VERSION}; convert again"
            )
        self.config: dict[str, Any] = self._layout["config"]
        self.generation_config: dict[str, Any] = self._layout["generation_config"]
        sizes = _file_sizes(path / PARAMS)
        wrong = sorted(f for f, size in self._layout["files"].items() if sizes.get(f) != size)
        if wrong:
            raise ModelLoadError(
                f"{len(wrong)} files of {path / PARAMS} are missing or truncated: {', '.join(wrong)}; "
                "the copy is probably incomplete, copy or convert again"
            )

    def names(self) -> Sequence[str]:
        return list(self._layout["params"])

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._layout["params"][name]["shape"])

    def dtype(self, name: str) -> np.dtype:
        """Of plain parameters; quantised ones have float32 values."""
        return np.dtype(jnp.dtype(self._layout["params"][name].get("dtype", "float32")))

    def decoded(self, name: str) -> bool:
        return "format" in self._layout["params"][name]

    def nbytes(self, name: str) -> int:
        leaves = jax.tree.leaves(_abstract(self._layout["params"][name]))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        raise TypeError(f"{self.path} is in final layout; its parameters are restored together, by load_params")

    def decode(self, name: str, rows: slice, out: np.ndarray) -> None:
        self.read(name)

    def release(self, name: str) -> None:
        pass

    def fingerprint(self) -> bytes:
        """SHA-256 of the source's fingerprint, the configuration and the layout."""
        return hashlib.sha256(json.dumps(self._layout, sort_keys=True).encode()).digest()

    def abstract_kept(
        self, specs: Mapping[str, ParamSpec], shardings: Mapping[str, Sharding]
    ) -> dict[str, QuantisedTensor]:
        """Shapes and shardings of the parameters that were written packed."""
        stored = {name: _abstract(self._layout["params"][name]) for name in specs if name in self._layout["params"]}
        packed = {name: param for name, param in stored.items() if isinstance(param, QuantisedTensor)}
        return {name: _placed(param, shardings[name]) for name, param in packed.items()}

    def restore(
        self, specs: Mapping[str, ParamSpec], shardings: Mapping[str, Sharding], dtype: Any, progress: Progress | None
    ) -> tuple[dict[str, Any], LoadReport]:
        """Every parameter on its sharding. Raises ModelLoadError that lists all that were written otherwise."""
        import orbax.checkpoint as ocp

        begun = time.perf_counter()
        stored = {name: _abstract(row) for name, row in self._layout["params"].items()}
        self._check(specs, stored, dtype)
        wanted = {name: _placed(stored[name], shardings[name]) for name in specs}
        total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(wanted))
        tell = progress or (lambda done, total: None)
        tell(0, total)
        with ocp.StandardCheckpointer() as checkpointer:
            found = checkpointer.restore(self.path.absolute() / PARAMS, {n: _leaves(p) for n, p in wanted.items()})
        params = {n: _joined(wanted[n], found[n]) for n in specs}
        jax.block_until_ready(params)
        tell(total, total)
        return params, LoadReport(total, time.perf_counter() - begun)

    def _check(self, specs: Mapping[str, ParamSpec], stored: Mapping[str, Any], dtype: Any) -> None:
        wrong = [f"{n} is missing" for n in sorted(specs.keys() - stored.keys())]
        wrong += [f"{n} is unexpected" for n in sorted(stored.keys() - specs.keys())]
        for name in sorted(specs.keys() & stored.keys()):
            spec, has = specs[name], stored[name]
            if tuple(has.shape) != _expected_shape(spec, has):
                wrong.append(f"{name} has shape {tuple(has.shape)}, the model on this mesh needs {spec.shape}")
            elif not isinstance(has, QuantisedTensor) and has.dtype != jnp.dtype(spec.dtype or dtype):
                wrong.append(f"{name} has dtype {has.dtype}, {jnp.dtype(spec.dtype or dtype)} is asked for")
        if wrong:
            raise ModelLoadError(
                f"{self.path} was converted for another layout: {'; '.join(wrong)}. "
                "Convert the original checkpoint again for this mesh and dtype"
            )


def _leaves(param: Any) -> dict[str, Any]:
    if isinstance(param, QuantisedTensor):
        return {"packed": param.packed} | ({"scale": param.scale} if math.prod(param.scale.shape) else {})
    return {"value": param}


def _joined(like: Any, leaves: Mapping[str, Any]) -> Any:
    if isinstance(like, QuantisedTensor):
        scale = leaves.get("scale")
        if scale is None:  # GGUF blocks hold theirs, and an empty array is not written
            scale = jax.device_put(jnp.zeros(like.scale.shape, like.scale.dtype), like.scale.sharding)
        return QuantisedTensor(leaves["packed"], scale, like.format, like.group)
    return leaves["value"]


def _row(param: Any) -> dict[str, Any]:
    """What layout.json says of a parameter."""
    if isinstance(param, QuantisedTensor):
        scale = {"shape": list(param.scale.shape), "dtype": param.scale.dtype.name}
        return {"shape": list(param.shape), "format": param.format, "group": param.group, "scale": scale}
    return {"shape": list(param.shape), "dtype": param.dtype.name}


def _abstract(row: Mapping[str, Any]) -> Any:
    if "format" not in row:
        return jax.ShapeDtypeStruct(tuple(row["shape"]), jnp.dtype(row["dtype"]))
    packed = abstract(tuple(row["shape"]), row["format"], group=row["group"]).packed
    scale = jax.ShapeDtypeStruct(tuple(row["scale"]["shape"]), jnp.dtype(row["scale"]["dtype"]))
    return QuantisedTensor(packed, scale, row["format"], row["group"])  # pyright: ignore[reportArgumentType]


def _placed(param: Any, sharding: Sharding) -> Any:
    """On the parameter's sharding; a quantised one has its `in` axes merged, and its scales may have none."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=first_axes(sharding, leaf.ndim)), param
    )


def _expected_shape(spec: ParamSpec, stored: Any) -> tuple[int, ...]:
    if not isinstance(stored, QuantisedTensor) or spec.in_axes < 2:
        return spec.shape
    outs = len(spec.shape) - spec.in_axes
    return (*spec.shape[:outs], math.prod(spec.shape[outs:]))


def _file_sizes(folder: Path) -> dict[str, int]:
    return {str(f.relative_to(folder)): f.stat().st_size for f in sorted(folder.rglob("*")) if f.is_file()}


def _write_beside(path: Path, params: Mapping[str, Any], source: Checkpoint, dtype: Any) -> None:
    """The files that are not parameters; layout.json last, and at once."""
    if source.path.is_dir():
        for pattern in _TEXT_FILES:
            for file in source.path.glob(pattern):
                shutil.copy(file, path / file.name)
    else:
        from trillion_infer.weights.gguf_file import write_metadata_only

        write_metadata_only(source.path, path / "tokenizer.gguf")
    config = dict(source.config)
    config.pop("dtype", None)
    layout = {
        "version": VERSION,
        "source": source.fingerprint().hex(),
        "config": config | {"torch_dtype": jnp.dtype(dtype).name},
        "generation_config": source.generation_config,
        "params": {name: _row(param) for name, param in params.items()},
        "files": _file_sizes(path / PARAMS),
    }
    partial = path / f"{LAYOUT}.partial"
    partial.write_text(json.dumps(layout), encoding="utf-8")
    os.replace(partial, path / LAYOUT)

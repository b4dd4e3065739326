"""Small synthetic checkpoints on disk: Hugging Face directories and GGUF files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.numpy import save_file

Tensors = Mapping[str, np.ndarray]


def write_hf_directory(path: Path, tensors: Tensors, config: Mapping[str, Any], shards: int = 1) -> Path:
    """Writes config.json and one safetensors file, or `shards` files with an index; returns `path`."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
    if shards == 1:
        save_file({n: np.ascontiguousarray(t) for n, t in tensors.items()}, path / "model.safetensors")
        return path
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {n: np.ascontiguousarray(t) for j, (n, t) in enumerate(tensors.items()) if j % shards == i}
        save_file(part, path / file)
        weight_map |= dict.fromkeys(part, file)
    write_index(path, weight_map)
    return path


def write_index(path: Path, weight_map: Mapping[str, str]) -> None:
    """Writes model.safetensors.index.json."""
    index = {"metadata": {}, "weight_map": dict(weight_map)}
    (path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def write_gguf(
    path: Path,
    tensors: Tensors,
    arch: str,
    metadata: Mapping[str, Any],
    qtypes: Mapping[str, GGMLQuantizationType] | None = None,
) -> Path:
    """Writes a GGUF with float32 `tensors` under their GGUF names, block-quantised where `qtypes` says; returns `path`.

    `metadata` keys without a known first part ("general", "tokenizer", "split") get the prefix `arch`.
    """
    writer = GGUFWriter(path, arch)
    for key, value in metadata.items():
        full = key if key.split(".")[0] in ("general", "tokenizer", "split") else f"{arch}.{key}"
        _add(writer, full, value)
    for name, tensor in tensors.items():
        qtype = (qtypes or {}).get(name)
        if qtype is None:
            writer.add_tensor(name, np.ascontiguousarray(tensor))
        else:
            writer.add_tensor(name, quantize(np.ascontiguousarray(tensor, np.float32), qtype), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)

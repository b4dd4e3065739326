"""A GGUF file as a checkpoint with Hugging Face names, shapes and values."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trillion_infer.core.errors import ModelLoadError, UnsupportedModelError
from trillion_infer.weights.checkpoint import digest
from trillion_infer.weights.dequantise import PLAIN, dequantise
from trillion_infer.weights.gguf_config import config_from_gguf, generation_config_from_gguf
from trillion_infer.weights.gguf_file import GGUFFile

_FREQ_FACTORS = "rope_freqs.weight"
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA3_LAYER = _LAYER | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class GGUFCheckpoint:
    """Block-quantised tensors are decoded when read; plain ones are views of the mapped file."""

    def __init__(self, path: Path):
        self.path = path
        self._file = GGUFFile(path)
        metadata = self._file.metadata
        if metadata.get("split.count", 1) > 1:
            raise UnsupportedModelError(
                f"{path} is one part of a split GGUF; join the parts with llama-gguf-split --merge"
            )
        tensors = self._file.tensors
        factors = self._file.raw(_FREQ_FACTORS).reshape(-1).view(np.float32) if _FREQ_FACTORS in tensors else None
        self.config: dict[str, Any] = config_from_gguf(metadata, "output.weight" not in tensors, factors)
        self.generation_config: dict[str, Any] = generation_config_from_gguf(metadata)
        self._stored = _hf_names(path, self.config, [n for n in tensors if n != _FREQ_FACTORS])

    def decoded(self, name: str) -> bool:
        return True

    def names(self) -> Sequence[str]:
        return list(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._stored[name]].shape

    def dtype(self, name: str) -> np.dtype:
        return PLAIN.get(self._file.tensors[self._stored[name]].qtype, np.dtype(np.float32))

    def nbytes(self, name: str) -> int:
        tensor = self._file.tensors[self._stored[name]]
        return tensor.end - tensor.begin

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        out = np.empty(self.shape(name), dtype or self.dtype(name))
        self.decode(name, slice(0, len(out)), out)
        return out

    def decode(self, name: str, rows: slice, out: np.ndarray) -> None:
        packed = self._packed(name)
        part = packed if packed.ndim == 1 else packed[rows]
        dequantise(part, self._file.tensors[self._stored[name]].qtype, out)
        if self.config["model_type"] == "gemma3_text" and name.endswith("norm.weight"):
            out -= np.ones((), out.dtype)  # stored as 1 + w

    def block_type(self, name: str) -> str:
        """GGML's name of a tensor's type."""
        return self._file.tensors[self._stored[name]].qtype.name

    def read_raw(self, name: str) -> tuple[str, np.ndarray]:
        """GGML type name and packed blocks, uint8 `[rows, bytes of a row]`.

        Rows are in the order of `read`; a row's blocks are as in the file. A view where no rows had to move.
        """
        return self._file.tensors[self._stored[name]].qtype.name, self._packed(name)

    def packed_shape(self, name: str) -> tuple[int, ...]:
        """Shape of the blocks that `read_raw` gives, without moving a row."""
        return self._file.raw(self._stored[name]).shape

    def release(self, name: str) -> None:
        tensor = self._file.tensors[self._stored[name]]
        self._file.mapped.release(tensor.begin, tensor.end)

    def fingerprint(self) -> bytes:
        rows = [(n, t.shape, t.qtype.name, t.begin) for n, t in self._file.tensors.items()]
        return digest(self.config, rows, [self._file.mapped.bytes])

    def _packed(self, name: str) -> np.ndarray:
        """Packed rows in Hugging Face's order: llama.cpp interleaves the rotary halves of Llama's heads."""
        raw = self._file.raw(self._stored[name])
        kind = re.search(r"\.self_attn\.([qk])_proj\.", name)
        if kind is None or self.config["model_type"] != "llama":
            return raw
        heads = self.config["num_attention_heads" if kind[1] == "q" else "num_key_value_heads"]
        rows = raw if raw.ndim == 2 else raw.reshape(*self.shape(name), -1)
        return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(raw.shape)


def _hf_names(path: Path, config: dict[str, Any], names: Sequence[str]) -> dict[str, str]:
    """Name in the GGUF of each Hugging Face name, in file order."""
    layer = _GEMMA3_LAYER if config["model_type"] == "gemma3_text" else _LAYER
    mapped, unknown = {}, []
    for name in names:
        part = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        if name in _TOP:
            mapped[_TOP[name]] = name
        elif part and part[2] in layer:
            mapped[f"model.layers.{part[1]}.{layer[part[2]]}.{part[3]}"] = name
        else:
            unknown.append(name)
    if unknown:
        raise ModelLoadError(
            f"{path} holds {len(unknown)} tensors that {config['model_type']} models do not have: {', '.join(unknown)}"
        )
    return mapped

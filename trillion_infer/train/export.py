"""A trained head as a Hugging Face EAGLE-3 folder: config.json and model.safetensors."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from trillion_infer.config.drafter import Eagle3Spec
from trillion_infer.config.model import AttentionSpec, DenseSpec

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


def export_head(
    folder: Path, spec: Eagle3Spec, weights: Mapping[str, Any], kept: np.ndarray, dtype: str = "float32"
) -> None:
    """Writes the head. kept: the target's ids of the drafted vocabulary, ascending."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: np.ascontiguousarray(np.asarray(value).astype(DTYPES[dtype])) for name, value in weights.items()}
    tensors["d2t"] = kept.astype(np.int64) - np.arange(len(kept))
    tensors["t2d"] = np.isin(np.arange(spec.target_vocab), kept)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(describe(spec, dtype), indent=2) + "\n", encoding="utf-8")


def describe(spec: Eagle3Spec, dtype: str) -> dict[str, Any]:
    """The config.json of a Llama-shaped head."""
    config = spec.config
    layer = config.layers[0]
    mixer = layer.mixer
    assert isinstance(mixer, AttentionSpec)
    assert mixer.rope is not None
    assert isinstance(layer.ffn, DenseSpec)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "attention_bias": False,
        "draft_vocab_size": config.vocab,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(spec.aux_layers or ()),
            "use_aux_hidden_state": True,
        },
        "head_dim": mixer.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.width,
        "intermediate_size": layer.ffn.width,
        "max_position_embeddings": config.max_len,
        "num_attention_heads": mixer.heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": mixer.kv_heads,
        "rms_norm_eps": config.norm_eps,
        "rope_scaling": None,
        "rope_theta": mixer.rope.theta,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "vocab_size": spec.target_vocab,
    }

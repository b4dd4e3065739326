"""Writes golden/NAME.json: what transformers makes of a GGUF, as a digest of each tensor and the parsed config.

Run in the oracle environment (torch, transformers, gguf):
    python tests/weights/make_gguf_golden.py smollm2 PATH.gguf
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

KEYS = """architectures model_type hidden_size intermediate_size num_hidden_layers num_attention_heads
num_key_value_heads head_dim vocab_size rms_norm_eps max_position_embeddings tie_word_embeddings sliding_window
layer_types query_pre_attn_scalar rope_parameters""".split()


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]


def main(name: str, path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    config = model.config.to_dict()
    golden = {
        "config": {k: config[k] for k in KEYS if config.get(k) is not None},
        "tensors": {n: [list(t.shape), digest(t)] for n, t in model.state_dict().items() if n != "lm_head.weight"},
    }
    out = Path(__file__).parent / "golden" / f"{name}.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(golden, indent=0) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

"""Tiny random text models and their golden logits.

    python tests/oracle/make_tiny.py [NAME …]     # all of tiny_configs.TEXT_MODELS without a name

Writes golden/tiny/NAME/{config.json,model.safetensors,golden.npz} and prints a line a model.
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from tiny_configs import TEXT_MODELS
from tiny_model import build, check_reload, disk_tensors, text_config, tiny_folder, write_checkpoint, write_golden


def make(name: str) -> None:
    """Makes one model."""
    config = TEXT_MODELS[name]
    seed, model, traces = build(name, text_config(config))
    folder = tiny_folder(name)
    with tempfile.TemporaryDirectory() as scratch:
        write_checkpoint(folder, config, disk_tensors(model, Path(scratch)))
    rounding = write_golden(folder, model, traces)
    if config["model_type"] != "kimi_k2":
        check_reload(folder, traces)
    size = (folder / "model.safetensors").stat().st_size
    spread = traces[-1].logits.std()
    gap = min(float(t.gaps.min()) for t in traces)
    distinct = [len(set(t.tokens.tolist())) for t in traces]
    print(f"{name}: seed {seed}, {size} bytes, logits std {spread:.2f}, float64 {rounding:.0e}, gap {gap:.4f}, {distinct}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    disable_progress_bar()
    for wanted in sys.argv[1:] or TEXT_MODELS:
        make(wanted)

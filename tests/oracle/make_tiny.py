"""Tiny random text models and their golden logits.

    python tests/oracle/make_tiny.py [NAME …]     # all of tiny_configs.TEXT_MODELS without a name

Writes golden/tiny/NAME/{config.json,model.safetensors,golden.npz} and prints a line a model.
"""

import sys
import tempfile
from pathlib import Path

import torch
from tiny_configs import MULTIMODAL, TEXT_MODELS
from tiny_model import build, check_reload, disk_tensors, text_config, tiny_folder, write_checkpoint, write_golden
from transformers.utils.logging import disable_progress_bar


def make(name: str) -> None:
    """Makes one model."""
    config = TEXT_MODELS[name]
    seed, model, traces = build(name, text_config(config))
    folder = tiny_folder(name)
    with tempfile.TemporaryDirectory() as scratch:
        tensors = disk_tensors(model, Path(scratch))
        write_checkpoint(folder, config, tensors)
    rounding = write_golden(folder, model, traces)
    if config["model_type"] != "kimi_k2":
        check_reload(folder, traces)
    if name in MULTIMODAL:
        write_multimodal(folder, name, tensors)
    size = (folder / "model.safetensors").stat().st_size
    spread = traces[-1].logits.std()
    gap = min(float(t.gaps.min()) for t in traces)
    distinct = [len(set(t.tokens.tolist())) for t in traces]
    print(
        f"{name}: seed {seed}, {size} bytes, logits std {spread:.2f}, float64 {rounding:.0e}, gap {gap:.4f}, {distinct}"
    )


def write_multimodal(folder: Path, name: str, tensors: dict[str, torch.Tensor]) -> None:
    """The same text model as multimodal checkpoints hold it: nested config, prefixed names, stray vision tensors."""
    nested = MULTIMODAL[name] | {"text_config": TEXT_MODELS[name]}
    prefixed = {f"language_model.{key}": value for key, value in tensors.items()}
    prefixed["vision_model.patch_embedding.linear.weight"] = torch.zeros(4, 12).bfloat16()
    prefixed["multi_modal_projector.linear_1.weight"] = torch.zeros(4, 4).bfloat16()
    write_checkpoint(folder, nested, prefixed)


if __name__ == "__main__":
    torch.set_num_threads(1)
    disable_progress_bar()
    for wanted in sys.argv[1:] or TEXT_MODELS:
        make(wanted)

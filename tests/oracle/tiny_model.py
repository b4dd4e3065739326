"""Random weights with structure, checkpoint files, and golden arrays of one tiny model."""

import copy
import json
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from common import GOLDEN, Trace, first_good_seed, greedy, save_npz
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config, PretrainedConfig, PreTrainedModel

PROMPT_LENGTHS = (5, 40, 96)
MIN_GAP = 2e-3
MAX_ROUNDING = 1e-4
FLOAT32_ON_DISK = ("e_score_correction_bias",)


def text_config(config: dict) -> PretrainedConfig:
    """The transformers config of a text model; Kimi's `kimi_k2` is DeepSeek V3 under another name."""
    fields = {k: v for k, v in config.items() if k not in ("model_type", "quantization_config")}
    if config["model_type"] == "kimi_k2":
        return DeepseekV3Config(**fields)
    return AutoConfig.for_model(config["model_type"], **fields)


def generator(name: str, seed: int) -> torch.Generator:
    """A generator that depends on the model's name and `seed` alone."""
    return torch.Generator().manual_seed(zlib.crc32(f"{name}:{seed}".encode()))


def random_model(config: PretrainedConfig, rng: torch.Generator) -> PreTrainedModel:
    """Builds a float32 model with eager attention; every weight is random and exact in bfloat16."""
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    ).eval()
    buffers = {k: v for k, v in model.named_buffers() if k.endswith(FLOAT32_ON_DISK)}
    values = dict(model.named_parameters()) | buffers
    with torch.no_grad():
        for name in sorted(values):
            draw = torch.randn(values[name].shape, generator=rng)
            value = _mean(name, config) + _std(name, values[name].shape, config) * draw
            exact = value if name.endswith(FLOAT32_ON_DISK) else value.bfloat16().float()
            values[name].copy_(exact)
    return model


def _mean(name: str, config: PretrainedConfig) -> float:
    """Norm weights stand around 1 (Gemma's, added to 1, around 0), all else around 0.

    A tied head has small embeddings, or every token would predict itself; the last norm makes up for it.
    """
    if "norm" not in name:
        return 0.0
    lift = 3.0 if config.tie_word_embeddings and name == "model.norm.weight" else 0.0
    return lift + (0.0 if config.model_type.startswith("gemma3") else 1.0)


def _std(name: str, shape: torch.Size, config: PretrainedConfig) -> float:
    """A scale at which attention is peaked, experts differ and logits have a spread of about 2."""
    width = config.hidden_size
    if "embed_tokens" in name:
        return 0.5 / width**0.5 if config.tie_word_embeddings else 1.0
    if "lm_head" in name:
        return 2.0 / width**0.5
    if "norm" in name or name.endswith("bias"):
        return 0.2
    if name.endswith("sinks"):
        return 1.0
    if "router" in name or name.endswith("gate.weight"):
        return 2.0 / width**0.5
    transposed = len(shape) == 3 and config.model_type in ("gpt_oss", "llama4_text")
    fan_in = shape[1] if transposed else shape[-1]
    gain = 1.5 if any(part in name for part in ("q_proj", "k_proj", "q_b_proj")) else 1.0
    if config.model_type == "gpt_oss" and name.endswith("gate_up_proj"):
        gain = 3.0  # far enough out that its clamps act
    return gain / fan_in**0.5


def prompts(name: str, vocab: int, lengths: tuple[int, ...] = PROMPT_LENGTHS) -> list[list[int]]:
    """One random prompt for each length."""
    rng = generator(f"{name}/prompts", 0)
    return [torch.randint(0, vocab, (length,), generator=rng).tolist() for length in lengths]


def trace_all(model: PreTrainedModel, rows: list[list[int]]) -> list[Trace]:
    """One greedy run a prompt, each on a copy: dynamic RoPE keeps state from one prompt to the next."""
    return [greedy(copy.deepcopy(model), row) for row in rows]


def build(
    name: str,
    config: PretrainedConfig,
    twin: Callable[[PreTrainedModel], PreTrainedModel] = lambda model: model,
) -> tuple[int, PreTrainedModel, list[Trace]]:
    """The first seed whose greedy runs come near no tie (see `first_good_seed`), with `twin` applied to its model."""

    def attempt(seed: int) -> tuple[PreTrainedModel, list[Trace]]:
        model = twin(random_model(config, generator(name, seed)))
        return model, trace_all(model, prompts(name, config.vocab_size))

    return first_good_seed(attempt, MIN_GAP)


def disk_tensors(model: PreTrainedModel, scratch: Path) -> dict[str, torch.Tensor]:
    """The model's tensors under their published names, bfloat16 except where checkpoints keep float32."""
    model.save_pretrained(scratch)
    tensors = load_file(scratch / "model.safetensors")
    return {k: v if k.endswith(FLOAT32_ON_DISK) else v.bfloat16() for k, v in sorted(tensors.items())}


def write_checkpoint(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> None:
    """Writes `config.json` and `model.safetensors`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file({k: v.clone().contiguous() for k, v in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


def write_golden(folder: Path, model: PreTrainedModel, traces: list[Trace]) -> float:
    """Writes `golden.npz` and returns the largest difference of its prompt logits from a float64 run."""
    worst = _rounding(model, traces)
    if worst > MAX_ROUNDING:
        raise RuntimeError(f"{folder.name}: float32 differs from float64 by {worst:.1e}; choose calmer weights")
    arrays: dict[str, np.ndarray] = {}
    for i, trace in enumerate(traces):
        arrays |= {
            f"prompt_{i}": trace.prompt,
            f"logits_{i}": trace.logits,
            f"tokens_{i}": trace.tokens,
            f"token_logits_{i}": trace.token_logits,
            f"gaps_{i}": trace.gaps,
        }
    save_npz(folder / "golden.npz", arrays)
    return worst


@torch.no_grad()
def _rounding(model: PreTrainedModel, traces: list[Trace]) -> float:
    worst = 0.0
    for trace in traces:
        wide = copy.deepcopy(model).double()
        out = wide(input_ids=torch.tensor(trace.prompt[None]), use_cache=False).logits[0]
        worst = max(worst, float((out - torch.from_numpy(trace.logits)).abs().max()))
    return worst


def check_reload(folder: Path, traces: list[Trace], **kwargs) -> None:
    """Loads the written checkpoint as any user would and compares its logits with the golden ones."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager", **kwargs
    ).eval()
    trace = traces[-1]
    with torch.no_grad():
        out = copy.deepcopy(model)(input_ids=torch.tensor(trace.prompt[None])).logits[0].numpy()
    worst = float(np.abs(out - trace.logits).max())
    if worst > 1e-5:
        raise RuntimeError(f"{folder.name}: the written files give other logits, by {worst:.1e}")


def tiny_folder(name: str) -> Path:
    """Where the tiny model `name` lives."""
    return GOLDEN / "tiny" / name

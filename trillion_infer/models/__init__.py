"""Model families by architecture name; each file maps Hugging Face names to a decoder that is data."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trillion_infer.config.hf import HFConfig
from trillion_infer.config.model import ModelConfig
from trillion_infer.core.errors import UnsupportedModelError
from trillion_infer.params.names import TensorNames

ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "DeepseekV3ForCausalLM": "deepseek",
    "KimiK2ForCausalLM": "deepseek",
    "KimiK25ForConditionalGeneration": "deepseek",
    "Llama4ForCausalLM": "llama4",
    "Llama4ForConditionalGeneration": "llama4",
    "GptOssForCausalLM": "gpt_oss",
}


@dataclass(frozen=True)
class Family:
    """What a checkpoint's config says, and how its tensors are named. ignore: tensors skipped with a notice.

    mtp_layers: layers after the last that predict further tokens (DeepSeek V3, section 2.2).
    """

    config: ModelConfig
    names: TensorNames
    ignore: tuple[str, ...] = ()
    mtp_layers: int = 0


def read_family(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> Family:
    """The family of a `config.json`; an unknown architecture or an unhandled attribute raises UnsupportedModelError."""
    names = config.get("architectures") or []
    known = next((name for name in names if name in ARCHITECTURES), None)
    if known is None:
        raise UnsupportedModelError(
            f"architecture {', '.join(names) or '(config.json names none)'} is not implemented; "
            f"implemented: {', '.join(sorted(ARCHITECTURES))}."
        )
    module = importlib.import_module(f"trillion_infer.models.{ARCHITECTURES[known]}")
    read: Callable[..., Family] = module.read
    return read(HFConfig(config), generation_config or {})

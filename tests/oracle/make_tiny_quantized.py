"""Tiny models stored quantised, with the logits of the float32 values their bytes stand for.

    python tests/oracle/make_tiny_quantized.py [NAME …]

- kimi_k25: a multimodal checkpoint's text part; routed experts int4 in groups of 32, with stray vision tensors
- deepseek_v3_fp8: e4m3 in 128 x 128 blocks, sizes that cut blocks
- gpt_oss and gpt_oss_mxfp4: one model, experts in bfloat16 and in mxfp4 (the same values)
"""

import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from quantize import Stored, fp8_block, int4_group, mxfp4
from safetensors.torch import load_file
from tiny_configs import DEEPSEEK_FP8, GPT_OSS, KIMI_K25
from tiny_model import FLOAT32_ON_DISK, build, check_reload, text_config, tiny_folder, write_checkpoint, write_golden
from transformers import AutoModelForCausalLM, Mxfp4Config, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

Tensors = dict[str, torch.Tensor]
Quantiser = Callable[[torch.Tensor], Stored]

ROUTED = re.compile(r"\.mlp\.experts\.\d+\.\w+_proj\.weight$")
LINEAR = re.compile(r"\.(self_attn|mlp)\..*_proj(_with_mqa)?\.weight$")
GPT_EXPERTS = re.compile(r"\.experts\.(gate_up|down)_proj$")


class Quantised:
    """Replaces a model's matching weights by their quantised values and remembers the stored form."""

    def __init__(self, pattern: re.Pattern, quantise: Quantiser, rename: Callable[[str, str], str]):
        self.pattern, self.quantise, self.rename = pattern, quantise, rename
        self.plain: Tensors = {}
        self.stored: Tensors = {}

    def __call__(self, model: PreTrainedModel) -> PreTrainedModel:
        """The float32 model whose matching weights are what quantisation leaves of them."""
        with tempfile.TemporaryDirectory() as scratch:
            model.save_pretrained(scratch)
            tensors = load_file(Path(scratch) / "model.safetensors")
            self.plain, self.stored = {}, {}
            for name, value in sorted(tensors.items()):
                if not self.pattern.search(name):
                    self.plain[name] = value
                    self.stored[name] = value if name.endswith(FLOAT32_ON_DISK) else value.bfloat16()
                    continue
                form = self.quantise(value)
                self.plain[name] = form.value
                self.stored |= {self.rename(name, suffix): t for suffix, t in form.tensors.items()}
            write_checkpoint(Path(scratch), model.config.to_dict(), self.plain)
            return AutoModelForCausalLM.from_pretrained(
                scratch, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
            ).eval()


def _beside(name: str, suffix: str) -> str:
    return name.removesuffix("weight") + suffix


def _mxfp4_transposed(weight: torch.Tensor) -> Stored:
    """gpt-oss keeps bfloat16 experts `[E, in, out]` and quantised ones `[E, out, in/32, …]`."""
    form = mxfp4(weight.transpose(1, 2).contiguous())
    return Stored(form.tensors, form.value.transpose(1, 2).contiguous())


def make_kimi_k25() -> None:
    """Nested config, `language_model.` names, int4 routed experts, vision tensors nobody should need."""
    twin = Quantised(ROUTED, int4_group, _beside)
    _, model, traces = build("kimi_k25", text_config(KIMI_K25["text_config"]), twin)
    tensors = {f"language_model.{name}": value for name, value in twin.stored.items()}
    tensors["vision_tower.patch_embed.proj.weight"] = torch.zeros(4, 3, 2, 2).bfloat16()
    tensors["mm_projector.proj.0.weight"] = torch.zeros(4, 4).bfloat16()
    write_checkpoint(tiny_folder("kimi_k25"), KIMI_K25, tensors)
    report("kimi_k25", model, traces)


def make_deepseek_v3_fp8() -> None:
    """Every linear layer but the head in fp8 blocks."""
    twin = Quantised(LINEAR, fp8_block, _beside)
    _, model, traces = build("deepseek_v3_fp8", text_config(DEEPSEEK_FP8), twin)
    write_checkpoint(tiny_folder("deepseek_v3_fp8"), DEEPSEEK_FP8, twin.stored)
    report("deepseek_v3_fp8", model, traces)


def make_gpt_oss() -> None:
    """The same values twice: bfloat16 experts, and the mxfp4 bytes they came from."""
    twin = Quantised(GPT_EXPERTS, _mxfp4_transposed, lambda name, suffix: f"{name}_{suffix}")
    _, model, traces = build("gpt_oss", text_config(GPT_OSS), twin)
    write_checkpoint(tiny_folder("gpt_oss"), GPT_OSS, {k: v.bfloat16() for k, v in twin.plain.items()})
    check_reload(tiny_folder("gpt_oss"), traces)
    quantisation = {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    }
    write_checkpoint(tiny_folder("gpt_oss_mxfp4"), GPT_OSS | {"quantization_config": quantisation}, twin.stored)
    check_reload(tiny_folder("gpt_oss_mxfp4"), traces, quantization_config=Mxfp4Config(dequantize=True))
    for name in ("gpt_oss", "gpt_oss_mxfp4"):
        report(name, model, traces)


def report(name: str, model: PreTrainedModel, traces: list) -> None:
    """Writes the golden arrays and prints a line."""
    rounding = write_golden(tiny_folder(name), model, traces)
    size = (tiny_folder(name) / "model.safetensors").stat().st_size
    gap = min(float(t.gaps.min()) for t in traces)
    distinct = [len(set(t.tokens.tolist())) for t in traces]
    print(f"{name}: {size} bytes, std {traces[-1].logits.std():.2f}, float64 {rounding:.0e}, gap {gap:.4f}, {distinct}")


MAKERS = {"kimi_k25": make_kimi_k25, "deepseek_v3_fp8": make_deepseek_v3_fp8, "gpt_oss": make_gpt_oss}

if __name__ == "__main__":
    torch.set_num_threads(1)
    disable_progress_bar()
    for wanted in sys.argv[1:] or MAKERS:
        MAKERS[wanted]()

"""A GGUF model in transformers, float32 and eager, and the golden records made from it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import DECODE_STEPS, greedy, prompt_logprobs, save_json, save_npz
from gguf import GGUFReader, dequantize
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

Entry = dict[str, Any]


@dataclass(frozen=True)
class RealModel:
    """The model and its tokenizer, both read from one GGUF file."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def load(cls, gguf: Path) -> "RealModel":
        """Dequantises every tensor to float32; raises when a weight is packed or differs from the gguf package's."""
        disable_progress_bar()
        where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, attn_implementation="eager").eval()
        other = {name: p.dtype for name, p in model.named_parameters() if p.dtype != torch.float32}
        if other:
            raise RuntimeError(f"not float32: {other}")
        _compare(model, gguf, "token_embd.weight", "model.embed_tokens")
        _compare(model, gguf, "blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj")
        return cls(model, AutoTokenizer.from_pretrained(**where))

    def chat_ids(self, messages: list[dict[str, str]], generation: bool) -> list[int]:
        """Token ids of the rendered conversation."""
        out = self.tokenizer.apply_chat_template(messages, add_generation_prompt=generation, return_dict=True)
        return list(out["input_ids"])

    def text_entry(self, name: str, kind: str, text: str) -> Entry:
        """A plain prompt."""
        return {"name": name, "kind": kind, "text": text, "ids": self.tokenizer(text)["input_ids"]}

    def chat_entry(self, name: str, messages: list[dict[str, str]]) -> Entry:
        """A conversation with its generation prompt."""
        return {"name": name, "kind": "chat", "messages": messages, "ids": self.chat_ids(messages, True)}

    def long_entry(self, name: str, text: str, length: int) -> Entry:
        """The first `length` tokens of a long text; `text` is left out because the cut may fall inside a character."""
        ids = self.tokenizer(text)["input_ids"]
        if len(ids) < length:
            raise ValueError(f"{name} has {len(ids)} tokens and needs {length}; give it more paragraphs")
        return {"name": name, "kind": "long", "ids": ids[:length]}

    def tokenizer_entry(self, text: str) -> Entry:
        """Ids of a text, and what they decode to with and without special tokens."""
        ids = self.tokenizer(text)["input_ids"]
        return {
            "text": text,
            "ids": ids,
            "decoded": self.tokenizer.decode(ids),
            "decoded_skip_special": self.tokenizer.decode(ids, skip_special_tokens=True),
        }

    def write(self, folder: Path, entries: list[Entry]) -> None:
        """Runs every entry and writes `prompts.json` and `golden.npz`; rows stand in the order of the entries."""
        rows = []
        for entry in entries:
            trace = greedy(self.model, entry["ids"])
            wide = torch.from_numpy(trace.token_logits).double().log_softmax(-1).numpy()
            chosen = wide[np.arange(DECODE_STEPS), trace.tokens]
            rows.append((trace.tokens, trace.gaps, chosen, prompt_logprobs(trace.logits, trace.prompt)))
            print(f"{entry['name']}: {len(entry['ids'])} tokens, smallest gap {trace.gaps.min():.4f}", flush=True)
        tokens, gaps, chosen, scores = zip(*rows, strict=True)
        save_json(folder / "prompts.json", entries)
        arrays = {
            "tokens": np.stack(tokens),
            "gaps": np.stack(gaps).astype(np.float32),
            "token_logprobs": np.stack(chosen).astype(np.float32),
            "prompt_logprobs": np.concatenate(scores),
            "prompt_offsets": np.cumsum([0] + [len(s) for s in scores]).astype(np.int32),
        }
        save_npz(folder / "golden.npz", arrays)

    @torch.no_grad()
    def penalised(
        self, ids: list[int], steps: int, repetition: float = 1.0, presence: float = 0.0, frequency: float = 0.0
    ) -> Entry:
        """Greedy tokens under penalties: repetition over prompt and output, presence and frequency over output only.

        Returns the tokens, and the top-two gap of the penalised logits at each step.
        """
        out = self.model(input_ids=torch.tensor([ids]), use_cache=True)
        tokens: list[int] = []
        gaps: list[float] = []
        for _ in range(steps):
            logits = out.logits[0, -1].double()
            seen = torch.tensor(sorted(set(ids + tokens)))
            picked = logits[seen]
            logits[seen] = torch.where(picked > 0, picked / repetition, picked * repetition)
            counts = torch.bincount(torch.tensor(tokens, dtype=torch.int64), minlength=len(logits))
            logits -= frequency * counts + presence * (counts > 0)
            top = logits.topk(2)
            tokens.append(int(top.indices[0]))
            gaps.append(round(float(top.values[0] - top.values[1]), 6))
            out = self.model(input_ids=torch.tensor([tokens[-1:]]), cache=out.cache, use_cache=True)
        return {"tokens": tokens, "gaps": gaps, "text": self.tokenizer.decode(tokens)}


def _compare(model: PreTrainedModel, gguf: Path, stored: str, module: str) -> None:
    """Raises unless the module's weight is the file's tensor as the gguf package dequantises it."""
    tensor = next(t for t in GGUFReader(gguf).tensors if t.name == stored)
    expected = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    if not torch.equal(model.get_submodule(module).weight, expected):
        raise RuntimeError(f"{module}.weight is not {stored} of {gguf.name}, dequantised")

"""Decode and prefill of a model of random weights beside what the devices could do: shares of bandwidth and of FLOP."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from sharding.topologies import DeviceKind, kind_of
from trillion_infer.config.model import AttentionSpec, DenseSpec, ModelConfig
from trillion_infer.core.sampling_params import SamplingParams
from trillion_infer.llm import LLM
from trillion_infer.models import read_family

LLAMA3_8B: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


@dataclass(frozen=True)
class Case:
    """`running` sequences of `context` prompt tokens each, `out` tokens out."""

    running: int
    context: int
    out: int


CASES = (Case(1, 1024, 64), Case(16, 1024, 96), Case(64, 1024, 192))
"""With chunks of 1,024 tokens a step computes one prompt, so `out` exceeds `running`: all run together for a while."""

TINY_CASES = (Case(1, 16, 6), Case(2, 16, 6))


@dataclass(frozen=True)
class Costs:
    """What one step must move and compute at least, by the model's own numbers.

    layer_flops: of a token in all layers, attention over the context left out. dense_bytes: weights that every step
    reads; expert_bytes: those of one expert in all layers.
    """

    token_flops: float
    head_flops: float
    dense_bytes: float
    expert_bytes: float
    experts: int
    top_k: int
    kv_bytes: float
    attention_flops: float

    @classmethod
    def of(cls, config: ModelConfig, itemsize: int) -> "Costs":
        """For decoders of attention with dense or mixture feed-forward; kv_bytes and attention_flops are of one token
        of context."""
        flops = dense = expert = kv = attention = 0.0
        experts, top_k = 1, 1
        for layer in config.layers:
            mixer = layer.mixer
            assert isinstance(mixer, AttentionSpec), "latent attention has costs of its own"
            inner = mixer.head_dim * (2 * mixer.heads + 2 * mixer.kv_heads)
            matrices = config.width * inner
            if isinstance(layer.ffn, DenseSpec):
                matrices += 3 * config.width * layer.ffn.width
            else:
                experts, top_k = layer.ffn.experts, layer.ffn.top_k
                one = 3 * config.width * layer.ffn.width
                shared = 3 * config.width * layer.ffn.shared_width + config.width * experts
                flops += 2 * top_k * one
                expert += one * itemsize
                matrices += shared
            flops += 2 * matrices
            dense += matrices * itemsize
            kv += 2 * mixer.kv_heads * mixer.head_dim * itemsize
            attention += 4 * mixer.heads * mixer.head_dim
        head = config.width * config.vocab
        return cls(flops, 2 * head, dense + head * itemsize, expert, experts, top_k, kv, attention)

    def decode_bytes(self, running: int, context: float) -> float:
        """Weights read once, experts as often as some of `running` tokens choose them (drawn evenly), and the KV."""
        chosen = 0.0
        if self.expert_bytes:
            chosen = self.experts * (1 - (1 - self.top_k / self.experts) ** running)
        return self.dense_bytes + chosen * self.expert_bytes + running * context * self.kv_bytes

    def prefill_flops(self, tokens: int) -> float:
        """All products of a prompt, causal attention, and one row of logits."""
        return tokens * self.token_flops + self.attention_flops * tokens * (tokens + 1) / 2 + self.head_flops


def run_model(
    name: str, hf_config: Mapping[str, Any], cases: tuple[Case, ...], options: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """A JSON-ready line a case: tokens a second, and shares of the device's limits where its kind is known."""
    longest = max(case.context + case.out for case in cases) + 8
    running = max(case.running for case in cases)
    llm = LLM(hf_config, max_model_len=longest, max_running=running, prefix_caching=False, **options)
    llm.wait_for_programs()
    config = read_family(hf_config).config
    costs = Costs.of(config, 2 if llm.blueprint.dtype == "bfloat16" else 4)
    kind, devices = kind_of(jax.devices()[0].device_kind), llm.mesh.devices.size
    for case in cases:
        _measure(llm, case, config.vocab, 0)  # once for what happens the first time only
        decode, prefill = _measure(llm, case, config.vocab, 1)
        line: dict[str, Any] = {
            "model": name,
            "device": jax.devices()[0].device_kind,
            "devices": devices,
            "running": case.running,
            "context": case.context,
            "decode_tok_s": round(decode, 2),
            "prefill_tok_s": round(prefill, 2),
        }
        if kind is not None:
            line |= _shares(costs, case, decode, prefill, kind, devices)
        yield line
    llm.close()


def _measure(llm: LLM, case: Case, vocab: int, draw: int) -> tuple[float, float]:
    """Tokens a second of decoding all sequences together, and of prefilling one prompt alone."""

    def prompt(row: int) -> list[int]:
        return [(7 * i + 13 * row + 31 * draw) % (vocab - 8) + 4 for i in range(case.context)]

    prompts = [prompt(row) for row in range(case.running)]
    start = time.perf_counter()
    llm.generate([prompts[0]], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    prefill = case.context / (time.perf_counter() - start)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=case.out, ignore_eos=True))
    times = [output.metrics.token_times for output in outputs]
    begun, ended = max(each[0] for each in times), min(each[-1] for each in times)
    tokens = sum(sum(begun < at <= ended for at in each) for each in times)
    assert ended > begun, f"{case} ends before all of it runs: more tokens out are needed"
    return tokens / (ended - begun), prefill


def _shares(
    costs: Costs, case: Case, decode: float, prefill: float, kind: DeviceKind, devices: int
) -> dict[str, float]:
    steps = decode / case.running
    moved = steps * costs.decode_bytes(case.running, case.context + case.out / 2)
    computed = prefill / case.context * costs.prefill_flops(case.context)
    return {
        "decode_bandwidth_share": round(moved / (kind.bandwidth * devices), 4),
        "prefill_flops_share": round(computed / (kind.bf16_flops * devices), 4),
    }

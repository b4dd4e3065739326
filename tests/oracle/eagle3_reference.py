"""The mathematics of an EAGLE-3 head in plain torch: no cache, the whole prefix again for every draft.

Source: EAGLE-3 (arXiv 2503.01840) and the layout of its published checkpoints (shared/facts/speculation.md).
Letters: n prefix tokens, M width, H heads, D head dim, k drafts.

At position i the head sees the target's three auxiliary states of token i and the embedding of token i + 1, and
predicts token i + 2. Inside a chain a drafted position has no target state: it takes the head's own output of the
position before, unnormalised. Auxiliary state `a` is the residual stream after `a` decoder layers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Chain:
    """Drafted target ids `[k]`, the head's logits over its own vocabulary `[k, Vd]` and its hidden outputs `[k, M]`."""

    tokens: Tensor
    logits: Tensor
    hidden: Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rope_angles(config: PretrainedConfig, dim: int, length: int) -> tuple[Tensor, Tensor]:
    """cos and sin `[length, dim / 2]`, with the scaling of the config."""
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        inverse, factor = rope["rope_theta"] ** (-torch.arange(0, dim, 2).float() / dim), 1.0
    else:
        inverse, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    angles = torch.arange(length).float()[:, None] * inverse
    return angles.cos() * factor, angles.sin() * factor


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of `[H, n, D]` by `[H, n, D]`; returns `[n, H * Dv]`."""
    scores = q @ k.transpose(1, 2) * scale
    hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
    probs = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return (probs @ v).transpose(0, 1).flatten(1)


def llama_attention(weights: Weights, config: PretrainedConfig, x: Tensor) -> Tensor:
    """Grouped-query attention over `x [n, 2M]`, halves rotated."""
    heads, groups, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    cos, sin = rope_angles(config, dim, len(x))

    def rotate(y: Tensor) -> Tensor:
        first, second = y.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def split(name: str, count: int) -> Tensor:
        return (x @ weights[f"self_attn.{name}.weight"].T).view(len(x), count, dim).transpose(0, 1)

    q, k, v = rotate(split("q_proj", heads)), rotate(split("k_proj", groups)), split("v_proj", groups)
    k, v = k.repeat_interleave(heads // groups, 0), v.repeat_interleave(heads // groups, 0)
    return attend(q, k, v, dim**-0.5) @ weights["self_attn.o_proj.weight"].T


def latent_attention(weights: Weights, config: PretrainedConfig, x: Tensor) -> Tensor:
    """DeepSeek's latent attention over `x [n, 2M]`, neighbouring pairs rotated; its inner norms use eps 1e-6."""
    heads, nope, turned = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    cos, sin = rope_angles(config, turned, len(x))

    def rotate(y: Tensor) -> Tensor:
        even, odd = y[..., 0::2], y[..., 1::2]
        return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)

    def linear(name: str, y: Tensor) -> Tensor:
        return y @ weights[f"self_attn.{name}.weight"].T

    q = linear("q_b_proj", rms_norm(linear("q_a_proj", x), weights["self_attn.q_a_layernorm.weight"], 1e-6))
    q = q.view(len(x), heads, nope + turned).transpose(0, 1)
    latent, k_rope = linear("kv_a_proj_with_mqa", x).split([config.kv_lora_rank, turned], -1)
    kv = linear("kv_b_proj", rms_norm(latent, weights["self_attn.kv_a_layernorm.weight"], 1e-6))
    k_nope, v = kv.view(len(x), heads, -1).transpose(0, 1).split([nope, config.v_head_dim], -1)
    q = torch.cat([q[..., :nope], rotate(q[..., nope:])], -1)
    k = torch.cat([k_nope, rotate(k_rope)[None].expand(heads, -1, -1)], -1)
    scale = (nope + turned) ** -0.5
    rope = config.rope_parameters
    if rope.get("mscale_all_dim"):
        scale *= (0.1 * rope["mscale_all_dim"] * torch.tensor(rope["factor"]).log().item() + 1) ** 2
    return attend(q, k, v, scale) @ weights["self_attn.o_proj.weight"].T


def head_layer(weights: Weights, config: PretrainedConfig, embedded: Tensor, hidden: Tensor) -> Tensor:
    """The head's one layer: `embedded [n, M]` and `hidden [n, M]` to the unnormalised output `[n, M]`."""
    eps = config.rms_norm_eps
    normed = rms_norm(hidden, weights["hidden_norm.weight"], eps)
    x = torch.cat([rms_norm(embedded, weights["input_layernorm.weight"], eps), normed], -1)
    mixer = latent_attention if "self_attn.kv_b_proj.weight" in weights else llama_attention
    out = hidden + mixer(weights, config, x)
    y = rms_norm(out, weights["post_attention_layernorm.weight"], eps)
    gate, up = y @ weights["mlp.gate_proj.weight"].T, y @ weights["mlp.up_proj.weight"].T
    return out + (torch.nn.functional.silu(gate) * up) @ weights["mlp.down_proj.weight"].T


def draft_chain(
    tensors: Weights, layer: str, config: PretrainedConfig, embedding: Tensor, aux: Tensor, tokens: Tensor, drafts: int
) -> Chain:
    """Greedy chain of `drafts` after `tokens [n + 1]`, whose last one the target has just chosen; `aux [n, 3M]`."""
    weights = {name.removeprefix(layer): value for name, value in tensors.items() if name.startswith(layer)}
    hidden = aux @ tensors["fc.weight"].T
    following = tokens[1:]
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for _ in range(drafts):
        out = head_layer(weights, config, embedding[following], hidden)[-1]
        logits = rms_norm(out, tensors["norm.weight"], config.rms_norm_eps) @ tensors["lm_head.weight"].T
        best = logits.argmax()
        target = best + tensors["d2t"][best]
        found.append((target, logits, out))
        following = torch.cat([following, target[None]])
        hidden = torch.cat([hidden, out[None]])
    return Chain(*(torch.stack(part) for part in zip(*found, strict=True)))

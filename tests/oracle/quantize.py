"""Quantisers for the three weight formats of published trillion-parameter checkpoints (shared/facts/formats.md).

Each returns the stored tensors and the float32 values they stand for. Weights are `[out, in]`; groups run along `in`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E4M3_MAX = 448.0


@dataclass(frozen=True)
class Stored:
    """`tensors` by name suffix, and the float32 weight `value [out, in]` they decode to, exactly."""

    tensors: dict[str, Tensor]
    value: Tensor


def int4_group(weight: Tensor, group: int = 32) -> Stored:
    """compressed-tensors `pack-quantized`: eight nibbles `q + 8` an int32, lowest bits first; bfloat16 scales."""
    rows, cols = weight.shape
    groups = weight.float().reshape(rows, cols // group, group)
    scale = (groups.abs().amax(-1, keepdim=True) / 7).bfloat16()
    q = (groups / scale.float()).round().clamp(-8, 7).to(torch.int64)
    nibbles = (q + 8).reshape(rows, cols // 8, 8)
    words = (nibbles << (4 * torch.arange(8))).sum(-1)
    packed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    tensors = {
        "weight_packed": packed,
        "weight_scale": scale[..., 0],
        "weight_shape": torch.tensor([rows, cols], dtype=torch.int64),
    }
    return Stored(tensors, (q * scale.float()).reshape(rows, cols))


def fp8_block(weight: Tensor, block: int = 128) -> Stored:
    """DeepSeek V3's fp8: e4m3 values and one float32 multiplier for each `block` x `block`, the last ones cut short."""
    rows, cols = weight.shape
    tall, wide = -(-rows // block), -(-cols // block)
    padded = torch.zeros(tall * block, wide * block)
    padded[:rows, :cols] = weight
    tiles = padded.reshape(tall, block, wide, block)
    scale = (tiles.abs().amax((1, 3)) / E4M3_MAX).bfloat16().float()
    full = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[:rows, :cols]
    stored = (weight / full).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return Stored({"weight": stored, "weight_scale_inv": scale}, stored.float() * full)


def mxfp4(weight: Tensor) -> Stored:
    """OCP mxfp4 over the last axis: `blocks` of e2m1 pairs, low nibble first; `scales` e8m0 exponents, bias 127."""
    *lead, cols = weight.shape
    groups = weight.float().reshape(*lead, cols // 32, 32)
    exponent = groups.abs().amax(-1, keepdim=True).log2().floor() - 2
    scaled = groups / exponent.exp2()
    code = (scaled.abs()[..., None] - E2M1).abs().argmin(-1)
    nibble = code + 8 * (scaled < 0)
    pairs = nibble.reshape(*lead, cols // 32, 16, 2)
    tensors = {
        "blocks": (pairs[..., 0] | (pairs[..., 1] << 4)).to(torch.uint8),
        "scales": (exponent[..., 0] + 127).to(torch.uint8),
    }
    value = torch.where(scaled < 0, -E2M1[code], E2M1[code]) * exponent.exp2()
    return Stored(tensors, value.reshape(*lead, cols))

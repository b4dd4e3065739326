"""Rotary position embedding (arXiv 2104.09864) and the ways its frequencies are stretched."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from trillion_infer.config.model import Rope, RopeScaling


def inverse_frequencies(rope: Rope) -> np.ndarray:
    """float32 `[dim/2]`: theta^(-2i/dim), stretched as the scaling says (not for "dynamic": see rope_tables)."""
    base = 1.0 / (rope.theta ** (np.arange(0, rope.dim, 2, dtype=np.float32) / np.float32(rope.dim)))
    scaling = rope.scaling
    if scaling is None or scaling.kind == "dynamic":
        return base.astype(np.float32)
    if scaling.kind == "linear":
        return (base / scaling.factor).astype(np.float32)
    stretched = _llama3(base, scaling) if scaling.kind == "llama3" else _yarn(base, rope, scaling)
    return stretched.astype(np.float32)


def _llama3(base: np.ndarray, s: RopeScaling) -> np.ndarray:
    """Llama 3.1: long wavelengths are divided by the factor, short ones kept, those between interpolated."""
    wavelength = 2 * math.pi / base
    if s.high_freq_factor == s.low_freq_factor:
        return np.where(wavelength < s.original_len / s.high_freq_factor, base, base / s.factor)
    smooth = (s.original_len / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    blend = np.clip(smooth, 0.0, 1.0)
    return (1 - blend) * base / s.factor + blend * base


def _yarn(base: np.ndarray, rope: Rope, s: RopeScaling) -> np.ndarray:
    """YaRN (arXiv 2309.00071, section 3.2): dimensions that turn often are kept, slow ones divided by the factor."""

    def dimension(rotations: float) -> float:
        return rope.dim * math.log(s.original_len / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(s.beta_fast), dimension(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = (np.arange(rope.dim // 2, dtype=np.float32) - low) / max(high - low, 0.001)
    keep = 1.0 - np.clip(ramp, 0.0, 1.0)
    return base / s.factor * (1 - keep) + base * keep


def rope_tables(
    rope: Rope, positions: Int[Array, "T"], lengths: Int[Array, "T"]
) -> tuple[Float[Array, "T half"], Float[Array, "T half"]]:
    """cos and sin of every position, float32.

    lengths: for "dynamic" scaling only, the length a token's frequencies are stretched for: that of its whole
    prompt, or position + 1 after it.
    """
    scaling = rope.scaling
    if scaling is not None and scaling.kind == "dynamic":
        frequencies = _dynamic(rope, scaling, lengths)
    else:
        frequencies = jnp.asarray(inverse_frequencies(rope))[None, :]
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    factor = scaling.attention_factor if scaling is not None else 1.0
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def _dynamic(rope: Rope, s: RopeScaling, lengths: Int[Array, "T"]) -> Float[Array, "T half"]:
    """Dynamic NTK: past the trained length theta grows with the length of the sequence."""
    length = jnp.maximum(lengths, s.original_len).astype(jnp.float32)
    growth = (s.factor * length / s.original_len - (s.factor - 1)) ** (rope.dim / (rope.dim - 2))
    exponent = jnp.arange(0, rope.dim, 2, dtype=jnp.float32) / rope.dim
    return 1.0 / ((rope.theta * growth)[:, None] ** exponent[None, :])


def apply_rope(
    x: Float[Array, "T N D"],
    cos: Float[Array, "T half"],
    sin: Float[Array, "T half"],
    interleaved: bool = False,
) -> Float[Array, "T N D"]:
    """Rotates the first 2*half values of every head, float32 inside. interleaved: pairs are neighbours."""
    half = cos.shape[-1]
    rotated, rest = x[..., : 2 * half].astype(jnp.float32), x[..., 2 * half :]
    cos, sin = cos[:, None, :], sin[:, None, :]
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
        out = jnp.stack((first * cos - second * sin, second * cos + first * sin), axis=-1).reshape(rotated.shape)
    else:
        first, second = rotated[..., :half], rotated[..., half:]
        out = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    out = out.astype(x.dtype)
    return out if not rest.shape[-1] else jnp.concatenate((out, rest), axis=-1)

"""Pages of one KV dtype as pages of another, in the form in which they travel.

A vector (a head's key or value, or a latent entry) of eight bits travels as bytes, with the float32 scale of each of
its parts behind it; any other as its numbers.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.common.quantised_pool import LIMITS, quantise

SCALE_BYTES = 4


@dataclass(frozen=True)
class VectorFormat:
    """dtype of a vector's numbers, and the widths of its parts, each with a scale of its own where it is of 8 bits."""

    dtype: str
    parts: tuple[int, ...]

    @property
    def has_scales(self) -> bool:
        return self.dtype in LIMITS


def convert(data: Array, source: VectorFormat, target: VectorFormat) -> Array:
    """`data` (vectors along the last axis) in the target's format; itself where the formats are the same."""
    if source == target:
        return data
    numbers = _decode(data, source) if source.has_scales else data
    return _encode(numbers, target) if target.has_scales else numbers.astype(target.dtype)


def _decode(data: Array, source: VectorFormat) -> Array:
    width = sum(source.parts)
    numbers = lax.bitcast_convert_type(data[..., :width], jnp.dtype(source.dtype)).astype(jnp.float32)
    scales = lax.bitcast_convert_type(data[..., width:].reshape(*data.shape[:-1], -1, SCALE_BYTES), jnp.float32)
    return numbers * jnp.repeat(scales, jnp.asarray(source.parts), axis=-1, total_repeat_length=width)


def _encode(numbers: Array, target: VectorFormat) -> Array:
    values, scales, start = [], [], 0
    for width in target.parts:
        value, scale = quantise(numbers[..., start : start + width], target.dtype)
        values.append(value)
        scales.append(scale)
        start += width
    both = jnp.concatenate(values, axis=-1), jnp.stack(scales, axis=-1)
    return jnp.concatenate([bytes_of(x) for x in both], axis=-1)


def bytes_of(x: Array) -> Array:
    """The bytes of the elements along the last axis."""
    out = lax.bitcast_convert_type(x, jnp.uint8)
    return out if out.ndim == x.ndim else out.reshape(*x.shape[:-1], -1)

"""Weights kept as the blocks of a GGUF file: their sizes, and their values in XLA.

A row is a sequence of blocks. `d`, `m` are float16 at the beginning of a block, nibbles q4 the low halves of a run of
bytes, then its high halves:

| format | values, bytes | value |
|--------|---------------|-------|
| `q8_0` | 32, 34        | d * int8 |
| `q4_0` | 32, 18        | d * (q4 - 8) |
| `q4_1` | 32, 20        | d * q4 + m |
| `q4_k` | 256, 144      | d * scale * q4 - m * least, with 8 groups of 32 and six bits each for scale and least |
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

GGUF_BLOCKS = {"q8_0": (32, 34), "q4_0": (32, 18), "q4_1": (32, 20), "q4_k": (256, 144)}
"""Values and bytes of a block."""


def block_values(packed: UInt8[Array, "... bytes"], format: str) -> Float[Array, "... in"]:
    """Rows of blocks as float32, each value rounded once."""
    values, size = GGUF_BLOCKS[format]
    *lead, width = packed.shape
    blocks = packed.reshape(*lead, width // size, size)
    d = _half(blocks, 0)
    if format == "q8_0":
        out = jax.lax.bitcast_convert_type(blocks[..., 2:], jnp.int8).astype(jnp.float32) * d
    elif format == "q4_0":
        out = (_nibbles(blocks[..., 2:]) - 8) * d
    elif format == "q4_1":
        out = _nibbles(blocks[..., 4:]) * d + _half(blocks, 2)
    else:
        scale, least = _six_bits(blocks[..., 4:16])
        q = _nibbles(blocks[..., 16:].reshape(*lead, width // size, 4, 32)).reshape(*lead, width // size, 8, 32)
        out = q * (d * scale)[..., None] - (_half(blocks, 2) * least)[..., None]
    return out.reshape(*lead, width // size * values)


def _half(blocks: UInt8[Array, "... bytes"], at: int) -> Float[Array, "... 1"]:
    return jax.lax.bitcast_convert_type(blocks[..., at : at + 2], jnp.float16).astype(jnp.float32)[..., None]


def _nibbles(packed: UInt8[Array, "... n"]) -> Float[Array, "... 2*n"]:
    return jnp.concatenate([packed & jnp.uint8(15), packed >> jnp.uint8(4)], axis=-1).astype(jnp.float32)


def _six_bits(packed: UInt8[Array, "... 12"]) -> tuple[Float[Array, "... 8"], Float[Array, "... 8"]]:
    """Scales and minima: those of groups 0 to 3 in bytes of their own, the others' low four bits in the last bytes."""
    low, high, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    six, four, two = jnp.uint8(63), jnp.uint8(15), jnp.uint8(48)
    scale = jnp.concatenate([low & six, (rest & four) | ((low >> jnp.uint8(2)) & two)], axis=-1)
    least = jnp.concatenate([high & six, (rest >> jnp.uint8(4)) | ((high >> jnp.uint8(2)) & two)], axis=-1)
    return scale.astype(jnp.float32), least.astype(jnp.float32)

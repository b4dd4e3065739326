"""Keys and values out of the 32-bit words of a TPU pool; a word holds one lane of `pack` heads."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def unpack(word: Int[Array, "C D"], index: int, dtype: jnp.dtype) -> Float[Array, "C D"]:
    """Element `index` (0 is the lowest) of each word, read as `dtype` and widened to float32.

    fp8 is decoded from its bits, for chips that have no such type: exponent and mantissa are moved to where
    float32 has them. Its NaN and infinities become finite numbers.
    """
    dtype = jnp.dtype(dtype)
    if dtype.itemsize == 4:
        return lax.bitcast_convert_type(word, jnp.float32)
    if dtype == jnp.bfloat16:
        bits = word & jnp.int32(-65536) if index else word << 16
        return lax.bitcast_convert_type(bits, jnp.float32)
    if dtype == jnp.int8:
        return ((word << (24 - 8 * index)) >> 24).astype(jnp.float32)
    return decode_byte((word >> (8 * index)) & 0xFF, dtype)


def decode_byte(byte: Int[Array, "C D"], dtype: jnp.dtype) -> Float[Array, "C D"]:
    """The float32 of fp8 bits in 0..255, see `unpack`."""
    mantissa = {"float8_e4m3fn": 3, "float8_e5m2": 2}[jnp.dtype(dtype).name]
    magnitude = byte & 0x7F
    bias = {3: 120, 2: 112}[mantissa]
    normal = lax.bitcast_convert_type((magnitude << (23 - mantissa)) + (bias << 23), jnp.float32)
    tiny = magnitude.astype(jnp.float32) * 2.0 ** -(126 - bias + mantissa)
    value = jnp.where(magnitude >= 1 << mantissa, normal, tiny)
    return jnp.where(byte >= 0x80, -value, value)


def head_elements(head: int, pack: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """(word, index in it) of the key and of the value of a KV head, in a row of heads k0, v0, k1, v1, …"""
    return divmod(2 * head, pack), divmod(2 * head + 1, pack)

"""Bit-level packing of the four-bit formats and the shared exponents of microscaling."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

E4M3_MAX = 448.0
E2M1_MAX_EXPONENT = 2


def pack_int4(q: Int[Array, "... n"]) -> Int[Array, "... n//8"]:
    """Packs integers in [-8, 7], stored as q + 8, eight to an int32, the first in the lowest bits."""
    nibbles = (q + 8).astype(jnp.uint32).reshape(*q.shape[:-1], -1, 8)
    words = jnp.sum(nibbles << _nibble_shifts(8), axis=-1, dtype=jnp.uint32)
    return jax.lax.bitcast_convert_type(words, jnp.int32)


def unpack_int4(words: Int[Array, "... n//8"]) -> Int[Array, "... n"]:
    """Inverse of `pack_int4`."""
    unsigned = jax.lax.bitcast_convert_type(words, jnp.uint32)
    nibbles = (unsigned[..., None] >> _nibble_shifts(8)) & jnp.uint32(15)
    return nibbles.astype(jnp.int32).reshape(*words.shape[:-1], -1) - 8


def pack_pair(scale: Float[Array, "..."], offset: Float[Array, "..."]) -> Int[Array, "..."]:
    """Both rounded to bfloat16, the scale in the high half of a word, the offset in the low one."""

    def bits(x: Array) -> Array:
        return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16).astype(jnp.uint32)

    return jax.lax.bitcast_convert_type((bits(scale) << jnp.uint32(16)) | bits(offset), jnp.int32)


def unpack_pair(pair: Int[Array, "..."]) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Inverse of `pack_pair`: scale and offset in float32."""
    return (
        jax.lax.bitcast_convert_type(pair & jnp.int32(-65536), jnp.float32),
        jax.lax.bitcast_convert_type(pair << jnp.int32(16), jnp.float32),
    )


def pack_e2m1(x: Float[Array, "... n"]) -> UInt8[Array, "... n//2"]:
    """Rounds to the nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 (ties to even), two to a byte, the first in the low bits."""
    magnitude = jnp.abs(x)
    ties_down = sum((magnitude > edge).astype(jnp.uint8) for edge in (0.25, 1.25, 2.5, 5.0))
    ties_up = sum((magnitude >= edge).astype(jnp.uint8) for edge in (0.75, 1.75, 3.5))
    sign = jnp.signbit(x).astype(jnp.uint8)
    code = (ties_down + ties_up + (sign << jnp.uint8(3))).reshape(*x.shape[:-1], -1, 2)
    return code[..., 0] | (code[..., 1] << jnp.uint8(4))


def unpack_e2m1(packed: UInt8[Array, "... n//2"]) -> Float[Array, "... n"]:
    """The values in float32."""
    codes = jnp.stack([packed & jnp.uint8(15), packed >> jnp.uint8(4)], axis=-1)
    return e2m1_to_float(codes.reshape(*packed.shape[:-1], -1).astype(jnp.int32))


def e2m1_to_float(code: Int[Array, "..."]) -> Float[Array, "..."]:
    """Value of a four-bit code (sign, two exponent bits, one mantissa bit) by bit arithmetic alone.

    A normal number's exponent and mantissa move to float32's fields; code 1 is the one subnormal, 0.5.
    """
    magnitude = code & 7
    normal = ((magnitude << 22) + (126 << 23)).astype(jnp.int32)
    value = jax.lax.bitcast_convert_type(normal, jnp.float32)
    value = jnp.where(magnitude < 2, magnitude.astype(jnp.float32) * 0.5, value)
    return jnp.where(code >= 8, -value, value)


def e4m3_to_float(bits: Int[Array, "..."]) -> Float[Array, "..."]:
    """Value of the bits of a float8_e4m3fn in float32, NaN apart, by bit arithmetic alone."""
    magnitude = bits & 0x7F
    normal = jax.lax.bitcast_convert_type((magnitude << 20) + (120 << 23), jnp.float32)
    value = jnp.where(magnitude < 8, magnitude.astype(jnp.float32) * 2.0**-9, normal)
    return jnp.where(bits >= 128, -value, value)


def e8m0_to_float(scale: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """2**(scale - 127) in float32 (exactly; 0 means 2**-127, which float32 holds as a subnormal)."""
    bits = scale.astype(jnp.int32) << 23
    subnormal = jnp.int32(1 << 22)
    return jax.lax.bitcast_convert_type(jnp.where(bits == 0, subnormal, bits), jnp.float32)


def e8m0_for(absmax: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """Shared exponent of a group (OCP Microscaling 1.0, section 6.3): floor(log2(absmax)) less e2m1's largest."""
    _, exponent = jnp.frexp(absmax)
    biased = jnp.where(absmax > 0, exponent - 1 - E2M1_MAX_EXPONENT + 127, 0)
    return jnp.clip(biased, 1, 254).astype(jnp.uint8)


def _nibble_shifts(count: int) -> Array:
    return jnp.arange(0, 4 * count, 4, dtype=jnp.uint32)

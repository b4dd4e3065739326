"""Matrix products that read a stack of weights where it lies, in the form in which it is stored."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.cpu_native.load import require

_TYPES = ("float32", "bfloat16")
GGUF_BLOCKS = {"Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q4_K": (256, 144)}


def matmul(
    x: Float[Array, "T M"],
    w: Float[Array, "L N M"] | Float[Array, "N M"],
    layer: Int[Array, ""] | int = 0,
    *,
    out_dtype: jnp.dtype | type | None = None,
    isa: str = "auto",
) -> Float[Array, "T N"]:
    """Returns x @ w[layer].T, accumulated in float32.

    No slice of the stack is made, so inside a scan over layers the weights are read once, at memory speed.
    A row's result has the same bits whatever the other rows, their number and the number of threads are.

    Args:
      x: float32 or bfloat16.
      w: float32 or bfloat16, one matrix or a stack of them; every product is of the values as stored.
      layer: which of the stack; outside [0, L) is an error at run time.
      out_dtype: float32 or bfloat16; None is x's.
      isa: "auto", or the instruction set to use: avx2, avx512 or neon.

    Raises:
      ValueError: shapes or dtypes do not fit.
      NotImplementedError: there is no native library here, or not this instruction set.
    """
    if w.ndim == 2:
        w = w[None]
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[2]:
        raise ValueError(f"matmul takes x [T, M] and w [L, N, M] or [N, M], got {x.shape} and {w.shape}")
    if w.dtype.name not in _TYPES:
        raise ValueError(f"matmul takes weights in {' or '.join(_TYPES)}, got {w.dtype}")
    none = jnp.zeros((w.shape[0], 0, 0), jnp.float32)
    return _call(x, w, none, layer, w.dtype.name, out_dtype, isa)


def quantised_matmul(
    x: Float[Array, "T M"],
    packed: Int[Array, "L N M_packed"],
    scale: Float[Array, "L N *groups"],
    layer: Int[Array, ""] | int = 0,
    *,
    out_dtype: jnp.dtype | type | None = None,
    isa: str = "auto",
) -> Float[Array, "T N"]:
    """Returns x @ dequantised(packed, scale)[layer].T, with activations as they are and float32 sums.

    Args:
      x: float32 or bfloat16.
      packed: int8 `[L, N, M]` with scale `[L, N]`, or int32 `[L, N, M/8]` with scale `[L, N, M/group]` of group
        32, 64 or 128: element i of a row is bits 4*(i mod 8) of word i//8, stored as q + 8. L may be left out.
      scale: float32 or bfloat16.
      layer, out_dtype, isa: as in `matmul`, whose invariance also holds.

    Raises:
      ValueError: shapes or dtypes do not fit.
      NotImplementedError: there is no native library here, or not this instruction set.
    """
    if packed.ndim == 2:
        packed, scale = packed[None], scale[None]
    if x.ndim != 2 or packed.ndim != 3 or packed.dtype.name not in ("int8", "int32"):
        raise ValueError(f"x must be [T, M], packed int8 or int32 [L, N, ...]; got {x.shape}, {packed.shape}")
    depth = x.shape[1]
    layers, columns, width = packed.shape
    if packed.dtype.name == "int8":
        if width != depth or scale.shape != (layers, columns):
            raise ValueError(f"int8 {packed.shape} times x {x.shape} takes a scale [L, N], got {scale.shape}")
        return _call(x, packed, scale[:, None], layer, "int8", out_dtype, isa)
    group = depth // max(scale.shape[-1], 1)
    fits = scale.ndim == 3 and scale.shape[:2] == (layers, columns) and group * scale.shape[-1] == depth
    if width * 8 != depth or not fits or group not in (32, 64, 128):
        raise ValueError(
            f"int4 {packed.shape} times x {x.shape} takes scales [L, N, M/group] in groups of 32, 64 or 128,"
            f" got {scale.shape}"
        )
    return _call(x, packed, scale, layer, "int4", out_dtype, isa)


def gguf_matmul(
    x: Float[Array, "T M"],
    blocks: UInt8[Array, "L N bytes"],
    layer: Int[Array, ""] | int = 0,
    *,
    format: str,
    out_dtype: jnp.dtype | type | None = None,
    isa: str = "auto",
) -> Float[Array, "T N"]:
    """Returns x @ w[layer].T for a GGUF tensor kept as the bytes of the file.

    Args:
      x: float32 or bfloat16, M a multiple of the format's block.
      blocks: the rows of the tensor; L may be left out.
      format: Q8_0, Q4_0, Q4_1 or Q4_K.
      layer, out_dtype, isa: as in `matmul`, whose invariance also holds.

    Raises:
      ValueError: shapes, dtypes or the format do not fit.
      NotImplementedError: there is no native library here, or not this instruction set.
    """
    if format not in GGUF_BLOCKS:
        raise ValueError(f"GGUF format {format!r} has no native kernel; these have: {', '.join(GGUF_BLOCKS)}")
    if blocks.ndim == 2:
        blocks = blocks[None]
    values, size = GGUF_BLOCKS[format]
    if x.ndim != 2 or blocks.ndim != 3 or blocks.dtype != jnp.uint8:
        raise ValueError(f"x must be [T, M], blocks uint8 [L, N, bytes]; got {x.shape}, {blocks.shape}")
    if x.shape[1] % values or blocks.shape[2] != x.shape[1] // values * size:
        raise ValueError(f"{format} has {size} bytes for {values} elements: {blocks.shape} does not fit x {x.shape}")
    none = jnp.zeros((blocks.shape[0], 0, 0), jnp.float32)
    return _call(x, blocks, none, layer, format, out_dtype, isa)


def _call(x, w, scale, layer, format, out_dtype, isa) -> Array:
    out = jnp.dtype(out_dtype or x.dtype)
    for name, dtype in (("x", x.dtype), ("scale", scale.dtype), ("out_dtype", out)):
        if dtype.name not in _TYPES:
            raise ValueError(f"{name} must be {' or '.join(_TYPES)}, got {dtype}")
    require(isa)
    call = jax.ffi.ffi_call("ti_matmul", jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), out))
    return call(x, w, scale, jnp.asarray(layer, jnp.int32), format=format, isa=isa)

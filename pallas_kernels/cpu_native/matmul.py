"""Matrix products that read a stack of weights where it lies, in the form in which it is stored."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.cpu_native.load import require
from pallas_kernels.quantised_matmul import gguf_blocks

_TYPES = ("float32", "bfloat16")
GGUF_BLOCKS = {name.upper(): sizes for name, sizes in gguf_blocks.GGUF_BLOCKS.items()}


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
    int8_activations: bool = False,
) -> Float[Array, "T N"]:
    """Returns x @ dequantised(packed, scale)[layer].T, summed in float32.

    Args:
      x: float32 or bfloat16.
      packed: int8 or uint8 (the bits of e4m3) `[L, N, M]` with scale `[L, N]`, or int32 `[L, N, M/8]` with scale
        `[L, N, M/group]` of group 32, 64 or 128: element i of a row is bits 4*(i mod 8) of word i//8, stored as q + 8.
        L may be left out.
      scale: float32 or bfloat16; int32 for an int4 weight with offsets, scale and offset as bfloat16 in one word.
      layer, out_dtype, isa: as in `matmul`, whose invariance also holds.
      int8_activations: see `gguf_matmul`.

    Raises:
      ValueError: shapes or dtypes do not fit.
      NotImplementedError: there is no native library here, or not this instruction set.
    """
    if packed.ndim == 2:
        packed, scale = packed[None], scale[None]
    scale, format = _check_packed(x, packed, scale)
    return _call(x, packed, scale, layer, format, out_dtype, isa, int8_activations=int8_activations)


def gguf_matmul(
    x: Float[Array, "T M"],
    blocks: UInt8[Array, "L N bytes"],
    layer: Int[Array, ""] | int = 0,
    *,
    format: str,
    out_dtype: jnp.dtype | type | None = None,
    isa: str = "auto",
    int8_activations: bool = False,
) -> Float[Array, "T N"]:
    """Returns x @ w[layer].T for a GGUF tensor kept as the bytes of the file.

    Args:
      x: float32 or bfloat16, M a multiple of the format's block.
      blocks: the rows of the tensor; L may be left out.
      format: Q8_0, Q4_0, Q4_1 or Q4_K.
      layer, out_dtype, isa: as in `matmul`, whose invariance also holds.
      int8_activations: round x to int8, each 32 elements of a row with a float32 scale of their own (their greatest
        magnitude / 127), and multiply bytes (W4A8, W8A8): faster where arithmetic is the limit. Products of a group are
        summed exactly, groups in order, so that every instruction set gives the same bits. A group that holds a NaN or
        an infinity makes its row NaN. Without effect where there is no such product: fp8_row, M not a multiple of 32,
        N below 32.

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
    return _call(x, blocks, none, layer, format, out_dtype, isa, int8_activations=int8_activations)


def grouped_matmul(
    x: Float[Array, "T M"],
    w: Float[Array, "L E N M"],
    group_sizes: Int[Array, " E"],
    layer: Int[Array, ""] | int = 0,
    *,
    out_dtype: jnp.dtype | type | None = None,
    isa: str = "auto",
) -> Float[Array, "T N"]:
    """Multiplies each run of rows with its own expert's matrix; experts without rows are not read.

    Args:
      x: float32 or bfloat16; the first group_sizes[0] rows are of expert 0, and so on. Rows after all groups give 0.
      w: float32 or bfloat16; L may be left out.
      group_sizes: int32; a negative size or a sum above T is an error at run time.
      layer, out_dtype, isa: as in `matmul`, whose invariance also holds.

    Raises:
      ValueError: shapes or dtypes do not fit.
      NotImplementedError: there is no native library here, or not this instruction set.
    """
    w = w[None] if w.ndim == 3 else w
    if x.ndim != 2 or w.ndim != 4 or x.shape[1] != w.shape[3] or group_sizes.shape != w.shape[1:2]:
        raise ValueError(
            f"grouped_matmul takes x [T, M], w [L, E, N, M] and group_sizes [E], got {x.shape}, {w.shape} and"
            f" {group_sizes.shape}"
        )
    if w.dtype.name not in _TYPES:
        raise ValueError(f"grouped_matmul takes weights in {' or '.join(_TYPES)}, got {w.dtype}")
    flat = w.reshape(-1, *w.shape[2:])
    none = jnp.zeros((flat.shape[0], 0, 0), jnp.float32)
    return _call(x, flat, none, layer, w.dtype.name, out_dtype, isa, group_sizes)


def quantised_grouped_matmul(
    x: Float[Array, "T M"],
    packed: Int[Array, "L E N M_packed"],
    scale: Float[Array, "L E N *groups"],
    group_sizes: Int[Array, " E"],
    layer: Int[Array, ""] | int = 0,
    *,
    out_dtype: jnp.dtype | type | None = None,
    isa: str = "auto",
    int8_activations: bool = False,
) -> Float[Array, "T N"]:
    """`grouped_matmul` with weights stored as for `quantised_matmul`, an axis of experts after the layers."""
    if packed.ndim == 3:
        packed, scale = packed[None], scale[None]
    if packed.ndim != 4 or scale.shape[:2] != packed.shape[:2] or group_sizes.shape != packed.shape[1:2]:
        raise ValueError(
            f"packed must be [L, E, N, ...] with scales [L, E, N, ...] and group_sizes [E], got {packed.shape},"
            f" {scale.shape} and {group_sizes.shape}"
        )
    packed, scale = packed.reshape(-1, *packed.shape[2:]), scale.reshape(-1, *scale.shape[2:])
    scale, format = _check_packed(x, packed, scale)
    return _call(x, packed, scale, layer, format, out_dtype, isa, group_sizes, int8_activations)


def _check_packed(x, packed, scale) -> tuple[Array, str]:
    """The scale as the custom call takes it, [L, N or 1, ...], and the name of the format."""
    if x.ndim != 2 or packed.ndim != 3 or packed.dtype.name not in ("int8", "uint8", "int32"):
        raise ValueError(f"x must be [T, M], packed int8, uint8 or int32 [L, N, ...]; got {x.shape}, {packed.shape}")
    depth = x.shape[1]
    layers, columns, width = packed.shape
    format = {"int8": "int8", "uint8": "fp8_row", "int32": "int4"}[packed.dtype.name]
    if format != "int4":
        if width != depth or scale.shape != (layers, columns):
            raise ValueError(f"{format} {packed.shape} times x {x.shape} takes a scale [L, N], got {scale.shape}")
        return scale[:, None], format
    group = depth // max(scale.shape[-1], 1)
    fits = scale.ndim == 3 and scale.shape[:2] == (layers, columns) and group * scale.shape[-1] == depth
    if width * 8 != depth or not fits or group not in (32, 64, 128):
        raise ValueError(
            f"int4 {packed.shape} times x {x.shape} takes scales [L, N, M/group] in groups of 32, 64 or 128,"
            f" got {scale.shape}"
        )
    return scale, "int4_affine" if scale.dtype == jnp.int32 else "int4"


def _call(x, w, scale, layer, format, out_dtype, isa, group_sizes=None, int8_activations=False) -> Array:
    out = jnp.dtype(out_dtype or x.dtype)
    for name, dtype in (("x", x.dtype), ("scale", scale.dtype), ("out_dtype", out)):
        if dtype.name not in _TYPES and (name, format) != ("scale", "int4_affine"):
            raise ValueError(f"{name} must be {' or '.join(_TYPES)}, got {dtype}")
    require(isa)
    call = jax.ffi.ffi_call("ti_matmul", jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), out))
    group_sizes = jnp.zeros((0,), jnp.int32) if group_sizes is None else group_sizes.astype(jnp.int32)
    attributes = {"format": format, "isa": isa, "int8_activations": int8_activations}
    return call(x, w, scale, jnp.asarray(layer, jnp.int32), group_sizes, **attributes)

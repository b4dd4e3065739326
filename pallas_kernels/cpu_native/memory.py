"""Arrays that take memory only where they are written, and blocks of a GGUF file as numbers on the host."""

import ctypes

import jax
import numpy as np
from jaxtyping import Array

from pallas_kernels.cpu_native.load import native, require


def unwritten(like: jax.ShapeDtypeStruct) -> Array:
    """An array of this shape and dtype whose values are whatever its memory holds; for use within one device's program.

    Raises NotImplementedError where there is no native library.
    """
    require("auto")
    return jax.ffi.ffi_call("ti_unwritten", jax.ShapeDtypeStruct(like.shape, like.dtype))()


def decode_blocks(blocks: np.ndarray, format: str, out: np.ndarray) -> bool:
    """Writes the values of GGUF blocks to `out`; False, and nothing written, where no native code does it.

    Args:
      blocks: uint8, contiguous.
      format: GGML's name, e.g. Q4_1.
      out: float32 or bfloat16, contiguous; the same bits as ggml's reference rounds to.
    """
    library = native().library
    whole = blocks.flags.c_contiguous and out.flags.c_contiguous
    if library is None or not whole or out.dtype.name not in ("float32", "bfloat16"):
        return False
    call = library.ti_decode
    call.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int)
    done = call(format.encode(), blocks.ctypes.data, 1, out.size, out.ctypes.data, out.dtype.name == "bfloat16")
    return bool(done)

"""Arrays that take memory only where they are written, pages of mapped files, blocks of a GGUF file as numbers."""

import ctypes
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from pallas_kernels.cpu_native.load import native, require


def unwritten(like: jax.ShapeDtypeStruct) -> Array:
    """An array of this shape and dtype whose values are whatever its memory holds; for use within one device's program.

    Raises NotImplementedError where there is no native library.
    """
    require("auto")
    return jax.ffi.ffi_call("ti_unwritten", jax.ShapeDtypeStruct(like.shape, like.dtype))()


def will_need(
    stacks: Sequence[Array], layer: Int[Array, ""], wanted: Bool[Array, " E"], then: Bool[Array, " E"]
) -> Bool[Array, " E"]:
    """`then`, once the system has been asked to read what is wanted of the files that the stacks are mapped from.

    Args:
      stacks: `[L, E, …]`. A layer past the last asks for nothing.

    The reading goes on while the call has returned. Nothing is asked for memory that no file is behind.
    Raises NotImplementedError where there is no native library.
    """
    require("auto")
    result = jax.ShapeDtypeStruct(then.shape, then.dtype)
    call = jax.ffi.ffi_call("ti_will_need", result, input_output_aliases={2: 0})
    return call(jnp.asarray(layer, jnp.int32), wanted, then, *stacks)


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

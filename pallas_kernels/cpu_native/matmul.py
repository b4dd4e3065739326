"""Matrix products that read a stack of weights where it lies."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.cpu_native.load import require

_TYPES = (jnp.dtype("float32"), jnp.dtype("bfloat16"))


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
    out = jnp.dtype(out_dtype or x.dtype)
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[2]:
        raise ValueError(f"matmul takes x [T, M] and w [L, N, M] or [N, M], got {x.shape} and {w.shape}")
    if not {x.dtype, w.dtype, out} <= set(_TYPES):
        raise ValueError(f"matmul takes float32 or bfloat16, got x {x.dtype}, w {w.dtype}, out {out}")
    require(isa)
    call = jax.ffi.ffi_call("ti_matmul", jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), out))
    return call(x, w, jnp.asarray(layer, jnp.int32), isa=isa)

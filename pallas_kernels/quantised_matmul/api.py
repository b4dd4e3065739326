"""Matmul with a quantised weight and activations that keep their dtype."""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.common.backends import choose_backend
from pallas_kernels.common.lazy import LazyModule
from pallas_kernels.quantised_matmul import cpu, reference
from pallas_kernels.quantised_matmul.formats import QuantisedTensor

gpu, tpu = (LazyModule(f"pallas_kernels.quantised_matmul.{name}") for name in ("gpu", "tpu"))

ACTIVATION_DTYPES = ("float32", "bfloat16", "float16")


def quantised_matmul(
    x: Float[Array, "T in"],
    weight: QuantisedTensor,
    *,
    layer: Int[Array, ""] | None = None,
    backend: str = "auto",
    interpret: bool = False,
    int8_activations: bool = False,
) -> Float[Array, "T out"]:
    """x @ weight.T: weight-only quantisation, products of the dtype of x summed in float32.

    Args:
      x: activations, float32 or a 16-bit float.
      weight: `[out, in]`, or a stack `[L, out, in]` with `layer`. Pass the whole stack from inside a loop over
        layers: the op reads one layer of it in place, where a slice would first be copied.
      layer: which layer of a stack.
      backend: `auto`, `reference`, `tpu`, `gpu` or `cpu` (native kernels).
      interpret: run a Pallas kernel on CPU, for tests.
      int8_activations: the native CPU kernels may round x to int8, each 32 elements of a row with a scale of their own;
        the other backends never do.

    Returns:
      `[T, out]` in the dtype of x.

    Raises:
      ValueError: shapes or dtypes do not fit.
      UnsupportedError: no implementation can run them; every reason is listed.
    """
    check_activations(x)
    check_weight("weight", weight, 2, layer)
    if x.shape[1] != weight.shape[-1]:
        raise ValueError(f"x is {x.shape}, the weight {weight.shape}: x must have in={weight.shape[-1]} columns.")
    refusals = {
        "reference": lambda: None,
        "tpu": lambda: tpu.refusal(x, weight),
        "gpu": lambda: gpu.refusal(x, weight),
        "cpu": lambda: cpu.refusal(x, weight),
    }
    run = {
        "reference": lambda: reference.quantised_matmul,
        "tpu": lambda: functools.partial(tpu.quantised_matmul, interpret=interpret),
        "gpu": lambda: functools.partial(gpu.quantised_matmul, interpret=interpret),
        "cpu": lambda: functools.partial(cpu.quantised_matmul, int8_activations=int8_activations),
    }[choose_backend("quantised_matmul", backend, refusals)]()
    return run(x, weight, layer=as_index(layer))


def check_activations(x: Array) -> None:
    """Raises ValueError unless x is `[T, in]` of a dtype that kernels multiply."""
    if x.ndim != 2:
        raise ValueError(f"x must be [T, in]; got shape {x.shape}.")
    if x.dtype.name not in ACTIVATION_DTYPES:
        raise ValueError(f"x has dtype {x.dtype.name}; allowed are {', '.join(ACTIVATION_DTYPES)}.")


def check_weight(name: str, weight: Array | QuantisedTensor, ndim: int, layer) -> None:
    """Raises ValueError unless `weight` has `ndim` axes, and one more before them exactly where `layer` is given."""
    wanted = ndim + (layer is not None)
    if weight.ndim != wanted:
        stacked = "stacked over layers, since layer= is given" if layer is not None else "of one layer"
        raise ValueError(f"{name} must have {wanted} axes ({stacked}); got shape {weight.shape}.")
    if isinstance(weight, QuantisedTensor):
        weight.check()


def as_index(layer) -> Int[Array, ""] | None:
    """A layer number as an int32 scalar, None where there is none."""
    return None if layer is None else jnp.asarray(layer, jnp.int32)

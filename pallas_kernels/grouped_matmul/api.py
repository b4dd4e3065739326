"""Matmuls of a mixture of experts."""

import functools
from collections.abc import Callable

from jaxtyping import Array, Float, Int

from pallas_kernels.common.backends import choose_backend
from pallas_kernels.common.lazy import LazyModule
from pallas_kernels.grouped_matmul import cpu, experts, reference
from pallas_kernels.grouped_matmul.checks import check_ffn, check_grouped_matmul
from pallas_kernels.quantised_matmul.api import as_index
from pallas_kernels.quantised_matmul.formats import QuantisedTensor

gpu, tpu = (LazyModule(f"pallas_kernels.grouped_matmul.{name}") for name in ("gpu", "tpu"))


def grouped_matmul(
    x: Float[Array, "N M"],
    weight: Float[Array, "*L E F M"] | QuantisedTensor,
    group_sizes: Int[Array, "E"],
    *,
    layer: Int[Array, ""] | None = None,
    bias: Float[Array, "*L E F"] | None = None,
    backend: str = "auto",
    interpret: bool = False,
    int8_activations: bool = False,
) -> Float[Array, "N F"]:
    """Row r of group e is x[r] @ weight[e].T + bias[e]; groups stand one after another from row 0.

    Args:
      x: rows sorted by group. Rows at and past sum(group_sizes) are padding; their output is zero.
      weight: one matrix a group, plain or quantised; with `layer`, a stack of them over layers.
      group_sizes: rows of each group; the weight of an empty group is not read.
      layer: which layer of stacked weights and biases. The stack is read in place; a slice would be copied first.
      backend: `auto`, `reference`, `tpu`, `gpu` or `cpu` (native kernels).
      interpret: run a Pallas kernel on CPU, for tests.
      int8_activations: as in `quantised_matmul`.

    Returns:
      `[N, F]` in the dtype of x, summed in float32.

    Raises:
      ValueError: shapes or dtypes do not fit.
      UnsupportedError: no implementation can run them; every reason is listed.
    """
    check_grouped_matmul(x, weight, group_sizes, layer, bias)
    backend = choose_backend("grouped_matmul", backend, _refusals(x, weight))
    run, _ = _implementation(backend, interpret, int8_activations)
    return run(x, weight, group_sizes, layer=as_index(layer), bias=bias)


def grouped_ffn(
    x: Float[Array, "T M"],
    gate_up: Float[Array, "*L E 2 F M"] | QuantisedTensor,
    down: Float[Array, "*L E M F"] | QuantisedTensor,
    expert_ids: Int[Array, "T k"],
    expert_weights: Float[Array, "T k"],
    *,
    activation: str,
    gate_up_bias: Float[Array, "*L E 2 F"] | None = None,
    down_bias: Float[Array, "*L E M"] | None = None,
    scores_on_input: bool = False,
    layer: Int[Array, ""] | None = None,
    expert_offset: Int[Array, ""] | int = 0,
    backend: str = "auto",
    interpret: bool = False,
    int8_activations: bool = False,
    out_dtype: str | None = None,
) -> Float[Array, "T M"]:
    """Sum over each token's experts of weight * down(activation(gate(x), up(x))).

    A device that holds a shard of the experts passes the number of its first one as `expert_offset`; experts
    outside [expert_offset, expert_offset + E) contribute zero, so that a `psum` over shards gives the whole sum.
    Give padding tokens the id -1: they then touch no expert.

    Args:
      x: tokens of the batch.
      gate_up: gate (index 0) and up (index 1) matrices of each expert, plain or quantised.
      down: the matrix back to the model width. With `layer`, both are stacks over layers, read in place.
      expert_ids: the k experts of each token.
      expert_weights: their weights.
      activation: a name in `ACTIVATIONS`: `silu`, `clamped_swiglu` or `gelu_tanh`.
      gate_up_bias, down_bias: optional. Where F is split over devices, only one of them may add `down_bias`.
      scores_on_input: multiply the tokens before the expert instead of its output (Llama 4).
      layer: which layer of stacked weights and biases.
      expert_offset: number of the first expert held here.
      backend: `auto`, `reference`, `tpu`, `gpu` or `cpu` (native kernels).
      interpret: run a Pallas kernel on CPU, for tests.
      int8_activations: as in `quantised_matmul`.
      out_dtype: of the result; that of x if not given. Sums of parts of the experts are to be added in float32.

    Returns:
      `[T, M]`; hidden activations are rounded to the dtype of x, sums are float32.

    Raises:
      ValueError: shapes, dtypes or names do not fit.
      UnsupportedError: no implementation can run them; every reason is listed.
    """
    check_ffn(x, gate_up, down, expert_ids, expert_weights, activation, gate_up_bias, down_bias, layer)
    backend = choose_backend("grouped_ffn", backend, _refusals(x, gate_up, down))
    _, run = _implementation(backend, interpret, int8_activations)
    return run(
        x,
        gate_up,
        down,
        expert_ids,
        expert_weights,
        activation=activation,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        scores_on_input=scores_on_input,
        layer=as_index(layer),
        expert_offset=expert_offset,
        out_dtype=out_dtype or x.dtype.name,
    )


def _refusals(x: Array, *weights: Array | QuantisedTensor) -> dict[str, Callable[[], str | None]]:
    return {
        "reference": lambda: None,
        "tpu": lambda: tpu.refusal(x, *weights),
        "gpu": lambda: gpu.refusal(x, *weights),
        "cpu": lambda: cpu.refusal(x, *weights),
    }


def _implementation(backend: str, interpret, int8_activations: bool) -> tuple[Callable, Callable]:
    """`grouped_matmul` and `grouped_ffn` of a backend."""
    if backend == "reference":
        return reference.grouped_matmul, reference.grouped_ffn
    if backend == "cpu":
        project = functools.partial(cpu.project, int8_activations=int8_activations)
        return experts.with_kernel(project, cpu.MOST_TILE, interpret, split=False)
    platform = {"tpu": tpu, "gpu": gpu}[backend]
    return experts.with_kernel(platform.project, platform.MOST_TILE, interpret, True, platform.FEWER_COLUMNS)

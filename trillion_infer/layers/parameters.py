"""Holding declared parameters, and reading one layer of a stack without copying it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
from flax import nnx
from jax import lax
from jaxtyping import Array, Int

from pallas_kernels.common.backends import target_platform
from trillion_infer.params.tree import Declared
from trillion_infer.weights.spec import ParamSpec

M = TypeVar("M", bound=nnx.Module)


TILE_ROWS = 8
"""Of a TPU's tiling of parameters."""


def hold(module: nnx.Module, declared: Declared) -> None:
    """Gives `module` its own parameters: an attribute for each that is declared, None for what it has not. Trees within
    are for the modules within."""
    for name, part in declared.items():
        if not isinstance(part, Mapping):
            setattr(module, name, None if part is None else nnx.Param(part))


@dataclass(frozen=True)
class LayerSlice:
    """Layer `index` of a stacked parameter `[L, …]`, left in place so that an op may read it where it lies."""

    stack: Any
    index: Int[Array, ""]

    def read(self) -> Any:
        """This layer's own arrays (XLA materialises the slice)."""
        return jax.tree.map(self._read, self.stack)

    def _read(self, stack: Array) -> Array:
        """Some TPU compilers tile 16-bit matrices that a product reads by 16 rows, but parameters by 8: they would tile
        a whole stack anew in every step. Seen as tiles of 8 rows, which is no copy, the stack is left as it lies."""
        shape, held = stack.shape[1:], stack
        if len(shape) > 1 and stack.dtype.itemsize == 2 and shape[-2] % 16 == 0 and target_platform() == "tpu":
            held = stack.reshape(*stack.shape[:-2], -1, TILE_ROWS, stack.shape[-1])
        return lax.dynamic_index_in_dim(held, self.index, 0, keepdims=False).reshape(shape)


def value(param: nnx.Param | None) -> Any:
    """The array of a bound parameter: read out of its stack if it is in one. None stays None."""
    if param is None:
        return None
    held = param.get_value()
    return held.read() if isinstance(held, LayerSlice) else held


def following(module: M) -> M:
    """A copy of a bound module with the parameters of the next layer of its stacks; the last follows itself."""

    def next_layer(_: str, held: Any) -> LayerSlice:
        assert isinstance(held, LayerSlice)
        return replace(held, index=held.index + 1)

    return _holding(module, next_layer)


def param_specs(module: nnx.Module) -> dict[str, ParamSpec]:
    """Every declared parameter by its dotted path."""
    return {_dotted(path): param.get_value() for path, param in nnx.to_flat_state(nnx.state(module, nnx.Param))}


def bind(module: M, params: Mapping[str, Any], prefix: str = "", index: Array | None = None) -> M:
    """A copy of `module` whose parameters hold `params[prefix + path]`, or layer `index` of them."""

    def named(path: str, _: Any) -> Any:
        held = params[prefix + path]
        return held if index is None else LayerSlice(held, index)

    return _holding(module, named)


def _holding(module: M, of: Callable[[str, Any], Any]) -> M:
    """A copy of `module` whose parameters hold what `of` gives for their dotted path and what they held."""
    graph, state = nnx.split(module)
    flat = [(path, p.replace(of(_dotted(path), p.get_value()))) for path, p in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))

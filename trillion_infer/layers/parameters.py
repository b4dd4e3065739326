"""Declaring parameters stacked over the repeats of a layer, and reading one layer of a stack without copying it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Int

from pallas_kernels.common.backends import target_platform
from trillion_infer.weights.spec import ParamSpec, Source

Transform = Callable[[np.ndarray], np.ndarray]
M = TypeVar("M", bound=nnx.Module)


@dataclass(frozen=True)
class Part:
    """A checkpoint tensor's place in one layer's parameter: leading index, and numpy views to bring it in shape."""

    index: tuple[int | slice, ...] = ()
    transform: Transform | None = None


WHOLE = Part()
TILE_ROWS = 8
"""Of a TPU's tiling of parameters."""


def stacked(
    prefixes: tuple[str, ...],
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    parts: Mapping[str, Part],
    *,
    dtype: str | None = None,
    init: str = "normal",
    in_axes: int = 0,
) -> nnx.Param:
    """A parameter `[len(prefixes), *shape]` whose row i is filled from tensors `prefixes[i] + name` for each part.

    in_axes: how many trailing axes a product sums over that takes quantised weights, too (see ParamSpec).
    """
    sources = tuple(
        Source(prefix + name, (i, *part.index), part.transform)
        for i, prefix in enumerate(prefixes)
        for name, part in parts.items()
    )
    return nnx.Param(ParamSpec((len(prefixes), *shape), dtype, ("layers", *axes), sources, init, in_axes))


def single(shape: tuple[int, ...], axes: tuple[str | None, ...], name: str, part: Part = WHOLE, **kw: Any) -> nnx.Param:
    """A parameter outside the stacks, filled from one checkpoint tensor."""
    return nnx.Param(
        ParamSpec(
            shape,
            kw.get("dtype"),
            axes,
            (Source(name, part.index, part.transform),),
            kw.get("init", "normal"),
            kw.get("in_axes", 0),
        )
    )


def place_rows(module: nnx.Module, rows: tuple[int, ...], size: int) -> None:
    """Stacks of `size` rows for every parameter of `module`, of which layer i gets row `rows[i]`; the rest is zero."""
    placed = []
    for path, param in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        spec: ParamSpec = param.get_value()
        sources = tuple(replace(s, index=(rows[s.index[0]], *s.index[1:])) for s in spec.sources)  # pyright: ignore
        placed.append((path, param.replace(replace(spec, shape=(size, *spec.shape[1:]), sources=sources))))
    nnx.update(module, nnx.from_flat_state(placed))


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

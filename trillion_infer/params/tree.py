"""Declaring parameters, stacked over the repeats of a layer or alone, as a tree that modules take apart."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trillion_infer.weights.spec import ParamSpec, Source

Transform = Callable[[np.ndarray], np.ndarray]

Declared = dict[str, Any]
"""Name to a ParamSpec, to the tree of a module within, or to None where a kind of layer may have what this one has
not."""


@dataclass(frozen=True)
class Part:
    """A checkpoint tensor's place in one layer's parameter: leading index, and numpy views to bring it in shape."""

    index: tuple[int | slice, ...] = ()
    transform: Transform | None = None


WHOLE = Part()


def stacked(
    prefixes: tuple[str, ...],
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    parts: Mapping[str, Part],
    *,
    dtype: str | None = None,
    init: str = "normal",
    in_axes: int = 0,
) -> ParamSpec:
    """A parameter `[len(prefixes), *shape]` whose row i is filled from tensors `prefixes[i] + name` for each part.

    in_axes: how many trailing axes a product sums over that takes quantised weights, too (see ParamSpec).
    """
    sources = tuple(
        Source(prefix + name, (i, *part.index), part.transform)
        for i, prefix in enumerate(prefixes)
        for name, part in parts.items()
    )
    return ParamSpec((len(prefixes), *shape), dtype, ("layers", *axes), sources, init, in_axes)


def single(
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    name: str,
    part: Part = WHOLE,
    *,
    dtype: str | None = None,
    init: str = "normal",
    in_axes: int = 0,
) -> ParamSpec:
    """A parameter outside the stacks, filled from one checkpoint tensor."""
    return ParamSpec(shape, dtype, axes, (Source(name, part.index, part.transform),), init, in_axes)


def flat(declared: Declared) -> dict[str, ParamSpec]:
    """Every parameter of the tree by its dotted path."""
    return dict(_walk(declared, ""))


def _walk(declared: Declared, prefix: str) -> Iterator[tuple[str, ParamSpec]]:
    for name in sorted(declared):
        part = declared[name]
        if isinstance(part, ParamSpec):
            yield prefix + name, part
        elif part is not None:
            yield from _walk(part, f"{prefix}{name}.")


def placed_rows(declared: Declared, rows: tuple[int, ...], size: int) -> Declared:
    """The tree with stacks of `size` rows, of which layer i gets row `rows[i]`; the rest is zero."""

    def placed(part: Any) -> Any:
        if isinstance(part, dict):
            return {name: placed(within) for name, within in part.items()}
        if part is None:
            return None
        sources = tuple(replace(s, index=(rows[s.index[0]], *s.index[1:])) for s in part.sources)
        return replace(part, shape=(size, *part.shape[1:]), sources=sources)

    return placed(declared)

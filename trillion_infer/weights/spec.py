"""How a parameter is declared, once: shape, dtype, logical axes, and where its values come from."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

HOST_MEMORY = "pinned_host"
"""Kind of memory of parameters that stay on the host."""


@dataclass(frozen=True)
class Source:
    """One tensor of the checkpoint and the region of the parameter it fills.

    `index` selects the region on the leading axes (an int drops its axis, a slice keeps it, axes not named are whole).
    `transform` turns the tensor, as the checkpoint has it, into the region's shape; it should use views
    (reshape, transpose, slicing, broadcasting), because only the parts a device needs are then read.
    """

    name: str
    index: tuple[int | slice, ...] = ()
    transform: Callable[[np.ndarray], np.ndarray] | None = None


@dataclass(frozen=True)
class ParamSpec:
    """A parameter: its global `shape`, `dtype` (None is the engine's), one logical axis name a dimension.

    Regions that no source covers stay zero (padding of heads or vocabulary).
    `init` is what a random model gets: "normal", "ones" or "zeros". `in_axes` is how many trailing axes `layers.linear`
    (or another product that takes quantised weights) sums over; 0: the parameter stays as it is.
    """

    shape: tuple[int, ...]
    dtype: str | None
    axes: tuple[str | None, ...]
    sources: tuple[Source, ...] = ()
    init: str = "normal"
    in_axes: int = 0

    def __post_init__(self):
        if len(self.axes) != len(self.shape):
            raise ValueError(
                f"axes {self.axes} name {len(self.axes)} dimensions, shape {self.shape} has {len(self.shape)}"
            )
        if self.init not in ("normal", "ones", "zeros"):
            raise ValueError(f"init is {self.init!r}; it must be 'normal', 'ones' or 'zeros'")

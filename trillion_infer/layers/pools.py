"""KV pools as the layers pass them on: one array, or eight-bit numbers with their scales."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jaxtyping import Array, Float


@partial(jax.tree_util.register_dataclass, data_fields=("values", "scales"), meta_fields=())
@dataclass(frozen=True)
class QuantisedPool:
    """values: as a plain pool, int8 or float8_e4m3fn. scales: `[L, P, rows, p]`, one a slot and row (see
    pallas_kernels.common.quantised_pool): a row is a head's keys or values, or a part of a latent entry."""

    values: Array
    scales: Float[Array, "L P n p"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the values."""
        return self.values.shape

    @property
    def sharding(self) -> Any:
        """Of the values."""
        return self.values.sharding

    @property
    def nbytes(self) -> int:
        """Of values and scales."""
        return self.values.nbytes + self.scales.nbytes


Pool = Array | QuantisedPool

Pools = tuple[Any, ...]
"""A `Pool` a cache group, in the model's order, and last the cache of experts where they lie in
host memory."""


def on_pool(op: Callable[..., tuple[Array, ...]], place: int) -> Callable[..., tuple[Any, ...]]:
    """An attention op as a function of a `Pool`, its argument number `place` and its last result."""

    def run(*args: Any, **options: Any) -> tuple[Any, ...]:
        pool = args[place]
        if not isinstance(pool, QuantisedPool):
            return op(*args, **options)
        plain = (*args[:place], pool.values, *args[place + 1 :])
        *found, values, scales = op(*plain, **options, kv_scales=pool.scales)
        return *found, QuantisedPool(values, scales)

    return run

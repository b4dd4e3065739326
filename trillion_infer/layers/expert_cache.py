"""Experts that lie in host memory, and the hot ones of them on the device.

A cache of C slots serves every mixture layer. Before a layer's product the experts that its tokens need and that are
not in a slot are copied from the host, and the product then reads the slots. Out go those needed least often so far:
layers take turns, so that what was used longest ago is what is needed next.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

HITS, MISSES, CLOCK = 0, 1, 2
MEMORY = 1 << 12
"""Layers computed until counts of use are halved."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("gate_up", "down", "slot_of", "owner", "heat", "counts"),
    meta_fields=(),
)
@dataclass(frozen=True)
class ExpertCache:
    """One device's slots. gate_up `[C, 2, F, M]` and down `[C, M, F]`, plain or quantised.

    slot_of: 1 + the slot of each expert of each mixture layer, 0 where it is only on the host. owner: 1 + layer * E +
    expert of each slot, 0 where none. heat: how often each expert was needed lately. counts: experts found, experts
    copied, layers computed.
    """

    gate_up: Any
    down: Any
    slot_of: Int[Array, "N E"]
    owner: Int[Array, " C"]
    heat: Int[Array, "N E"]
    counts: Int[Array, "1 3"]

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))


def needed_experts(ids: Int[Array, "T k"], experts: int) -> Bool[Array, " E"]:
    """Which of the experts here some token goes to; ids outside [0, experts) are of no expert here."""
    here = (ids >= 0) & (ids < experts)
    return jnp.zeros(experts, jnp.bool_).at[jnp.where(here, ids, experts).reshape(-1)].set(True, mode="drop")


def slots_of_layer(cache: ExpertCache, number: Int[Array, ""]) -> Int[Array, " E"]:
    """The slot of each expert of a mixture layer, -1 where it is not in one."""
    return lax.dynamic_index_in_dim(cache.slot_of, number, keepdims=False) - 1


def bring_in(
    cache: ExpertCache,
    read: Callable[[Int[Array, ""]], tuple[Any, Any]],
    number: Int[Array, ""],
    needed: Bool[Array, " E"],
) -> ExpertCache:
    """The cache with all needed experts of mixture layer `number` in slots; there are at most C of them.

    read: gives gate_up and down of one expert of this layer, out of host memory.
    """
    experts, slots = cache.slot_of.shape[1], cache.owner.shape[0]
    row = slots_of_layer(cache, number)
    hit, miss = needed & (row >= 0), needed & (row < 0)
    clock = cache.counts[0, CLOCK] + 1
    heat = cache.heat.at[number].add(needed.astype(jnp.int32))
    heat = jnp.where(clock % MEMORY == 0, heat // 2, heat)
    worth = jnp.where(cache.owner > 0, heat.reshape(-1)[jnp.maximum(cache.owner - 1, 0)], -1)
    worth = worth.at[jnp.where(hit, row, slots)].set(jnp.iinfo(jnp.int32).max, mode="drop")
    coldest = jnp.argsort(worth, stable=True)
    rank = jnp.cumsum(miss) - 1
    target = jnp.where(miss, coldest[jnp.clip(rank, 0, slots - 1)], slots)
    evicted = jnp.where(miss, cache.owner[jnp.minimum(target, slots - 1)], 0) - 1
    flat = cache.slot_of.reshape(-1)
    flat = flat.at[jnp.where(evicted >= 0, evicted, flat.shape[0])].set(0, mode="drop")
    names = number * experts + jnp.arange(experts, dtype=jnp.int32)
    flat = flat.at[jnp.where(miss, names, flat.shape[0])].set(target.astype(jnp.int32) + 1, mode="drop")
    order = jnp.argsort(~miss, stable=True)

    def copy(i: Int[Array, ""], held: tuple[Any, Any]) -> tuple[Any, Any]:
        expert = order[i]
        return jax.tree.map(partial(_put, at=target[expert]), held, read(expert))

    count = miss.sum()
    gate_up, down = lax.fori_loop(0, count, copy, (cache.gate_up, cache.down))
    return ExpertCache(
        gate_up,
        down,
        flat.reshape(cache.slot_of.shape),
        cache.owner.at[target].set(names + 1, mode="drop"),
        heat,
        cache.counts + jnp.stack([hit.sum(), count, jnp.int32(1)]).astype(jnp.int32)[None],
    )


def from_host(stack: Any, layer: Int[Array, ""], expert: Int[Array, ""]) -> Any:
    """One expert `[1, …]` of a stack `[L, E, …]` in host memory, in device memory."""

    def take(leaf: Array) -> Array:
        starts = (layer, expert, *[jnp.int32(0)] * (leaf.ndim - 2))
        part = lax.dynamic_slice(leaf, starts, (1, 1, *leaf.shape[2:]))
        return jax.device_put(part, jax.memory.Space.Device)[0]

    return jax.tree.map(take, stack)


def _put(held: Array, new: Array, at: Int[Array, ""]) -> Array:
    return lax.dynamic_update_slice(held, new, (at, *[jnp.int32(0)] * (held.ndim - 1)))

"""Experts that lie in host memory, and the hot ones of them on the device.

A cache of C slots serves every mixture layer. The experts that a layer's tokens need and that are not in a slot are
copied from the host, and the product reads the slots. Out go those needed least often so far: layers take turns, so
that what was used longest ago is what is needed next.

On an accelerator a copy over its bus takes many times longer than the product of what it brings. So products run beside
copies: first of the experts that were there, then of each wave that has come while the next one is on its way.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import compute_on
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.common.varying import vary_like

_beside: Callable[..., Any] = getattr(compute_on, "compute_on2", compute_on.compute_on)
"""Its name before jax 0.11 and since."""

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


class Missing(NamedTuple):
    """Experts of one layer that have to be copied, `count` of them.

    order: their numbers, before those of the others. place: of each expert in `order`, -1 for those that are not
    missing. slot: where each missing one goes.
    """

    order: Int[Array, " E"]
    place: Int[Array, " E"]
    slot: Int[Array, " E"]
    count: Int[Array, ""]


Read = Callable[[Int[Array, ""]], tuple[Any, Any]]
"""gate_up and down of one expert of a layer, out of host memory."""


def make_room(cache: ExpertCache, number: Int[Array, ""], needed: Bool[Array, " E"]) -> tuple[ExpertCache, Missing]:
    """The cache whose tables have slots for all needed experts of mixture layer `number`, at most C of them, and which
    of these have yet to be copied to theirs."""
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
    count = miss.sum()
    room = replace(
        cache,
        slot_of=flat.reshape(cache.slot_of.shape),
        owner=cache.owner.at[target].set(names + 1, mode="drop"),
        heat=heat,
        counts=cache.counts + jnp.stack([hit.sum(), count, jnp.int32(1)]).astype(jnp.int32)[None],
    )
    return room, Missing(jnp.argsort(~miss, stable=True), jnp.where(miss, rank, -1), target, count)


def bring_in(cache: ExpertCache, read: Read, missing: Missing) -> ExpertCache:
    """The cache with the missing experts in their slots."""

    def copy(i: Int[Array, ""], held: tuple[Any, Any]) -> tuple[Any, Any]:
        expert = missing.order[i]
        return _put(held, read(expert), missing.slot[expert])

    gate_up, down = lax.fori_loop(0, missing.count, copy, (cache.gate_up, cache.down))
    return replace(cache, gate_up=gate_up, down=down)


def multiply_while_copying(
    cache: ExpertCache,
    read: Read,
    missing: Missing,
    product: Callable[[ExpertCache, Bool[Array, " E"]], Float[Array, "T M"]],
    at_once: int,
    nothing: Float[Array, "T M"],
) -> tuple[Float[Array, "T M"], ExpertCache]:
    """The sum of products over all experts, and the cache with the missing ones in their slots, `at_once` copied
    beside each product.

    product: what the experts of the mask, which are in their slots, add to each token. nothing: the zeros that the sum
    begins with, in the products' dtype.
    """

    def of_wave(held: tuple[Any, Any], wave: Int[Array, ""]) -> Float[Array, "T M"]:
        gate_up, down = held
        return product(replace(cache, gate_up=gate_up, down=down), missing.place // at_once == wave - 1)

    def copy_next(wave: Int[Array, ""], carry: tuple[tuple[Any, Any], Array]) -> tuple[tuple[Any, Any], Array]:
        held, total = carry
        last = missing.count - 1  # again, where a wave is not full
        experts = [missing.order[jnp.minimum(wave * at_once + i, last)] for i in range(at_once)]
        came = [read(expert) for expert in experts]
        total = total + of_wave(held, wave)
        for expert, new in zip(experts, came, strict=True):
            held = _put(held, new, missing.slot[expert])
        return held, total

    held = (cache.gate_up, cache.down)
    waves = (missing.count + at_once - 1) // at_once
    held, total = lax.fori_loop(0, waves, copy_next, (held, vary_like(nothing, held, missing)))
    gate_up, down = held
    return total + of_wave(held, waves), replace(cache, gate_up=gate_up, down=down)


def from_host(stacks: tuple[Any, Any], layer: Int[Array, ""], expert: Int[Array, ""], stream: bool) -> tuple[Any, Any]:
    """One expert `[1, …]` of stacks `[L, E, …]` in host memory, in device memory.

    stream: on a GPU's stream of its own. A TPU's copies are asynchronous by themselves; a GPU's would become part of
    the kernel that writes them to their slot.
    """

    def cut(leaf: Array, layer: Int[Array, ""], expert: Int[Array, ""]) -> Array:
        starts = (layer, expert, *[jnp.int32(0)] * (leaf.ndim - 2))
        part = lax.dynamic_slice(leaf, starts, (1, 1, *leaf.shape[2:]))
        return (part if stream else jax.device_put(part, jax.memory.Space.Device))[0]

    if stream:  # a call for each: XLA waits for one of several results before it takes them apart
        cut = _beside(cut, compute_type="gpu_stream:1", out_memory_spaces=jax.memory.Space.Device)
    return jax.tree.map(lambda leaf: cut(leaf, layer, expert), stacks)


def _put(held: tuple[Any, Any], new: tuple[Any, Any], slot: Int[Array, ""]) -> tuple[Any, Any]:
    def put(leaf: Array, part: Array) -> Array:
        return lax.dynamic_update_slice(leaf, part, (slot, *[jnp.int32(0)] * (leaf.ndim - 1)))

    return jax.tree.map(put, held, new)

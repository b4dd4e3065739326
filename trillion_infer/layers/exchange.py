"""Tokens to the devices of their experts and back: all-to-all where that moves less than gathering every token."""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.common.backends import target_platform

LEAST_TOKENS = 256
"""Tokens of a device from which on bytes count and not the number of collectives."""


def pays(tokens: int, choices: int, devices: int) -> bool:
    """Whether sending each of a token's `choices` to one of `devices` moves less than every token to all of them.

    A device sends tokens * choices * (devices - 1) / devices rows, and as many come back; gathering brings it
    tokens * (devices - 1), and the scattered sums cost the same again.
    """
    return tokens >= LEAST_TOKENS and choices < devices


@dataclass(frozen=True)
class Plan:
    """Rows sorted by the device they go to. sizes[s, r]: rows that device s sends to device r."""

    axes: tuple[str, ...]
    order: Int[Array, "N"]
    sizes: Int[Array, "n n"]
    me: Int[Array, ""]

    @property
    def sent(self) -> Int[Array, ""]:
        return self.sizes[self.me].sum()


def plan_rows(owner: Int[Array, "N"], axes: tuple[str, ...], devices: int) -> Plan:
    """Where each row goes. `owner`: a place along the mesh axes, or -1 for a row that stays and comes back as zero."""
    target = jnp.where(owner < 0, devices, owner)
    counts = jnp.zeros(devices + 1, jnp.int32).at[target].add(1)[:devices]
    order = jnp.argsort(target, stable=True).astype(jnp.int32)
    return Plan(axes, order, lax.all_gather(counts, axes), jnp.asarray(lax.axis_index(axes)))


def exchange_rows(
    rows: tuple[Array, ...],
    plan: Plan,
    run: Callable[..., Float[Array, "C M"]],
) -> Float[Array, "N M"]:
    """`run(arrays, held)` of the rows that come to this device, sent back to where each came from.

    Args:
      rows: arrays `[N, …]` that travel together.
      run: takes them as they arrived, `[C, …]`, and which of the C places hold one; C is n * N, the most there can be.

    Returns:
      The results in the order of `rows`; zeros for rows without an owner.
    """
    move = _Padded(plan) if target_platform() == "cpu" else _Ragged(plan)
    arrived = tuple(move.there(array[plan.order]) for array in rows)
    back = move.back(run(arrived, move.held))
    back = jnp.where((jnp.arange(back.shape[0]) < plan.sent)[:, None], back, 0)
    return jnp.zeros_like(back).at[plan.order].set(back)


@dataclass(frozen=True)
class _Ragged:
    """Exactly the rows there are, beside each other, in the order of their senders."""

    plan: Plan

    @property
    def held(self) -> Bool[Array, "C"]:
        places = self.plan.sizes.shape[0] * self.plan.order.shape[0]
        return jnp.arange(places) < self.plan.sizes[:, self.plan.me].sum()

    def there(self, rows: Array) -> Array:
        plan = self.plan
        out = jnp.zeros((plan.sizes.shape[0] * rows.shape[0], *rows.shape[1:]), rows.dtype)
        return self._move(rows, out, plan.sizes)

    def back(self, rows: Array) -> Array:
        out = jnp.zeros((self.plan.order.shape[0], *rows.shape[1:]), rows.dtype)
        return self._move(rows, out, self.plan.sizes.T)

    def _move(self, rows: Array, out: Array, sizes: Int[Array, "n n"]) -> Array:
        me = self.plan.me
        starts = jnp.cumsum(sizes, axis=1) - sizes
        places = jnp.cumsum(sizes, axis=0) - sizes
        return lax.ragged_all_to_all(
            rows, out, starts[me], sizes[me], places[me], sizes[:, me], axis_name=self.plan.axes
        )


@dataclass(frozen=True)
class _Padded:
    """As many places for each pair of devices as one has rows: for platforms without ragged collectives."""

    plan: Plan

    @property
    def held(self) -> Bool[Array, "C"]:
        sizes = self.plan.sizes[:, self.plan.me]
        return (jnp.arange(self.plan.order.shape[0])[None] < sizes[:, None]).reshape(-1)

    def there(self, rows: Array) -> Array:
        sizes = self.plan.sizes[self.plan.me]
        place = jnp.arange(rows.shape[0])
        target = jnp.searchsorted(jnp.cumsum(sizes), place, side="right")
        slot = place - (jnp.cumsum(sizes) - sizes)[jnp.minimum(target, sizes.shape[0] - 1)]
        boxes = jnp.zeros((sizes.shape[0], *rows.shape), rows.dtype).at[target, slot].set(rows, mode="drop")
        moved = lax.all_to_all(boxes, self.plan.axes, 0, 0, tiled=True)
        return moved.reshape(-1, *rows.shape[1:])

    def back(self, rows: Array) -> Array:
        sizes, count = self.plan.sizes[self.plan.me], self.plan.order.shape[0]
        boxes = lax.all_to_all(rows.reshape(-1, count, *rows.shape[1:]), self.plan.axes, 0, 0, tiled=True)
        place = jnp.arange(count)
        target = jnp.minimum(jnp.searchsorted(jnp.cumsum(sizes), place, side="right"), sizes.shape[0] - 1)
        return boxes[target, place - (jnp.cumsum(sizes) - sizes)[target]]

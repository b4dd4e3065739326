"""Pools split over devices along the slots of every page, and the merge of what the devices found.

A logical page holds `count * p` positions, where p is the pool's own axis of slots; the shard `index` holds slots
[index * p, (index + 1) * p) of every page. All shards share one page table.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


@dataclass(frozen=True)
class SlotShard:
    """Which part of every page a device holds. A pytree: `index` is traced, `count` static.

    A shard's slots are numbered block after block: slot c lies in block c // p of its sequence.
    """

    index: Int[Array, ""]
    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"a page can be split over 1 shard or more; got count={self.count}.")

    def page(self, slots: int) -> int:
        """Positions of a logical page whose shards hold `slots` slots each."""
        return self.count * slots

    def position(self, slot: Int[Array, "..."], slots: int) -> Int[Array, "..."]:
        """Position of a shard's slot; of pages with `slots` slots a shard."""
        if self.count == 1:
            return slot
        size = jnp.int32(slots)
        return lax.div(slot, size) * self.page(slots) + (self.index * size + lax.rem(slot, size))

    def below(self, position: Int[Array, "..."], slots: int) -> Int[Array, "..."]:
        """How many of a shard's slots hold positions less than `position`."""
        if self.count == 1:
            return position
        page, size = jnp.int32(self.page(slots)), jnp.int32(slots)
        rest = lax.rem(position, page) - self.index * size
        return lax.div(position, page) * size + jnp.minimum(jnp.maximum(rest, 0), size)


jax.tree_util.register_dataclass(SlotShard, data_fields=["index"], meta_fields=["count"])


def whole_pages() -> SlotShard:
    """The only shard of a pool that is not split."""
    return SlotShard(jnp.int32(0), 1)


def merge_over(
    out: Float[Array, "T H D"],
    lse: Float[Array, "T H"],
    axis_name: str | tuple[str, ...],
    scatter: int | None = None,
) -> Float[Array, "..."]:
    """The attention over all shards from each shard's own, inside `jax.shard_map`: what `merge_parts` gives first."""
    return merge_parts(out, lse, axis_name, scatter)[0]


def merge_parts(
    out: Float[Array, "T H D"],
    lse: Float[Array, "T H"],
    axis_name: str | tuple[str, ...],
    scatter: int | None = None,
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """The attention over the shards along some axes, and its own log-sum, so that merges over other axes may follow.

    Each shard's share is known from all log-sums, so that one sum over the devices is enough.

    Args:
      out: normalised within the shard. lse: logarithm of the shard's sum of exponentials, -inf where it saw nothing.
      axis_name: mesh axes over which the pool is split.
      scatter: 0 or 1 leaves each device only its part of the tokens or heads; None gives every device all.

    Returns:
      In float32, zero (and -inf) where no shard saw anything.
    """
    every = lax.all_gather(lse, axis_name)
    top = every.max(axis=0)
    whole = log_sum(top, jnp.exp(every - jnp.where(jnp.isfinite(top), top, 0)).sum(axis=0))
    share = jnp.exp(lse - jnp.where(jnp.isfinite(whole), whole, 0))
    weighted = out.astype(jnp.float32) * share[..., None]
    if scatter is None:
        return lax.psum(weighted, axis_name), whole
    merged = lax.psum_scatter(weighted, axis_name, scatter_dimension=scatter, tiled=True)
    part = merged.shape[scatter]
    return merged, lax.dynamic_slice_in_dim(whole, lax.axis_index(axis_name) * part, part, scatter)


def log_sum(peak: Float[Array, "..."], total: Float[Array, "..."]) -> Float[Array, "..."]:
    """Logarithm of `total * exp(peak)`, -inf where the total is 0."""
    return jnp.where(total > 0, peak + jnp.log(jnp.where(total > 0, total, 1)), -jnp.inf)

"""What every layer of a step needs to know besides its own weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from sharding.rules import SERVE_RULES, Rules, mesh_axis
from trillion_infer.config.model import CacheKey, Rope


@dataclass(frozen=True)
class Ops:
    """Which implementations a step uses.

    activation: dtype of activations and of the residual stream. attention, matmul: backend names of the ops.
    interpret: run Pallas kernels in interpret mode (tests).
    """

    activation: str = "float32"
    attention: str = "reference"
    matmul: str = "xla"
    interpret: bool = False

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.activation)


@dataclass(frozen=True)
class Sequences:
    """The ragged batch, as the attention ops take it (see ragged_paged_attention)."""

    positions: Int[Array, "T"]
    kv_lens: Int[Array, "S"]
    cu_q_lens: Int[Array, "S+1"]
    num_seqs: Int[Array, "2"]
    page_tables: tuple[Int[Array, "S B"], ...]


@dataclass(frozen=True)
class Context:
    """One step on one shard: the batch, rotary tables, op choices and the sizes of the mesh's axes.

    cache_index: place of a pool (and its page table) in the step's tuples. ropes: cos and sin `[T, dim/2]`.
    """

    sequences: Sequences
    ropes: Mapping[Rope, tuple[Float[Array, "T half"], Float[Array, "T half"]]]
    cache_index: Mapping[CacheKey, int]
    axis_sizes: Mapping[str, int]
    ops: Ops
    rules: Rules = field(default_factory=lambda: SERVE_RULES)

    def sum_over(self, x: Array, logical: str) -> Array:
        """Completes a contraction over a logical axis: sums over the mesh axis it is split on, if any."""
        axis = mesh_axis(self.rules, logical)
        return x if axis is None or self.axis_sizes[axis] == 1 else lax.psum(x, axis)

    def shard_index(self, logical: str) -> Int[Array, ""] | int:
        """This shard's place along the mesh axis of a logical axis."""
        axis = mesh_axis(self.rules, logical)
        return 0 if axis is None or self.axis_sizes[axis] == 1 else lax.axis_index(axis)

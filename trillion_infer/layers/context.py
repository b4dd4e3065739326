"""What every layer of a step needs to know besides its own weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from sharding.rules import SERVE_RULES, Rules, mesh_axes
from trillion_infer.config.model import CacheKey, Rope


@dataclass(frozen=True)
class Ops:
    """Which implementations a step uses.

    activation: dtype of activations and of the residual stream. attention, matmul: backend names of the ops.
    interpret: run Pallas kernels in interpret mode (tests). int8_activations: round activations to int8, each 32 of a
    row with a scale of their own, where native CPU kernels multiply them with packed weights. mapped_experts: experts
    lie in a mapped file, whose pages are asked for before they are read. expert_copies: of experts from host
    memory, "first" before a layer's product, "beside" products of others, or "stream", which is beside them on a GPU.
    """

    activation: str = "float32"
    attention: str = "reference"
    matmul: str = "xla"
    interpret: bool = False
    int8_activations: bool = False
    mapped_experts: bool = False
    expert_copies: Literal["first", "beside", "stream"] = "first"

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
    token_axes: mesh axes beside `data` over which the step's tokens are split; layers see their own tokens, `sequences`
    the whole batch except for `positions`. max_q_len: promise that no sequence has more query tokens.
    """

    sequences: Sequences
    ropes: Mapping[Rope, tuple[Float[Array, "T half"], Float[Array, "T half"]]]
    cache_index: Mapping[CacheKey, int]
    axis_sizes: Mapping[str, int]
    ops: Ops
    rules: Rules = field(default_factory=lambda: SERVE_RULES)
    token_axes: tuple[str, ...] = ()
    max_q_len: int | None = None

    def axes(self, logical: str) -> tuple[str, ...]:
        """The mesh axes with more than one device over which a logical axis is split."""
        return tuple(axis for axis in mesh_axes(self.rules, logical) if self.axis_sizes[axis] > 1)

    def sum_over(self, x: Array, logical: str) -> Array:
        """Completes a contraction over a logical axis: sums over the mesh axes it is split on, if any."""
        axes = self.axes(logical)
        return lax.psum(x, axes) if axes else x

    def gather(self, x: Array, logical: str, axis: int) -> Array:
        """The whole of array axis `axis`, of which each shard along a logical axis holds a part."""
        axes = self.axes(logical)
        return lax.all_gather(x, axes, axis=axis, tiled=True) if axes else x

    def whole_tokens(self, x: Array) -> Array:
        """`[T, …]` of all tokens of the batch from the part that this device has."""
        return lax.all_gather(x, self.token_axes, axis=0, tiled=True) if self.token_axes else x

    def first_token(self, count: int) -> Int[Array, ""] | int:
        """Place in the batch of the first of the `count` tokens that this device has."""
        return lax.axis_index(self.token_axes) * count if self.token_axes else 0

    def shard_index(self, logical: str) -> Int[Array, ""] | int:
        """This shard's place along the mesh axes of a logical axis."""
        axes = self.axes(logical)
        return lax.axis_index(axes) if axes else 0

"""Mixture of experts: routed experts over the `expert` axis, and an optional shared one."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.cpu_native import will_need
from pallas_kernels.grouped_matmul import grouped_ffn
from trillion_infer.config.model import DenseSpec, MoESpec
from trillion_infer.layers import exchange
from trillion_infer.layers.context import Context
from trillion_infer.layers.expert_cache import (
    ExpertCache,
    bring_in,
    from_host,
    make_room,
    multiply_while_copying,
    needed_experts,
    slots_of_layer,
)
from trillion_infer.layers.ffn import GatedFFN
from trillion_infer.layers.parameters import LayerSlice, following, hold, value
from trillion_infer.layers.router import Router
from trillion_infer.params.tree import Declared

FEW_ROWS, COPIES_OF_MANY = 2048, 8
"""Up to so many (token, choice) pairs a product beside each expert's copy costs little; with more of them one beside
each eight, of which the last may be copied again."""


class MoE(nnx.Module):
    """Routed experts and, where the model has one, a shared expert, with the parameters of `moe_params`."""

    gate_up: nnx.Param
    down: nnx.Param
    gate_up_bias: nnx.Param | None
    down_bias: nnx.Param | None

    def __init__(self, spec: MoESpec, declared: Declared):
        self.spec = spec
        hold(self, declared)
        self.router = Router(spec, declared["router"])
        shared = declared["shared"]
        self.shared = None if shared is None else GatedFFN(DenseSpec(spec.shared_width), shared)

    def __call__(self, x: Float[Array, "T M"], ctx: Context) -> Float[Array, "T M"]:
        """Where axes split both tokens and experts, each token goes to its experts, or, where that moves less, all
        tokens are gathered and their sums scattered back."""
        ids, weights = self.router(x, ctx)
        token = ctx.first_token(x.shape[0]) + jnp.arange(x.shape[0])
        ids = jnp.where((token >= ctx.sequences.cu_q_lens[-1])[:, None], -1, ids)
        apart = tuple(axis for axis in ctx.axes("experts") if axis == "data" or axis in ctx.token_axes)
        devices = math.prod(ctx.axis_sizes[axis] for axis in apart)
        exchanged = bool(apart) and exchange.pays(ids.shape[0], ids.shape[1], devices)
        if exchanged:
            routed = self._exchanged(x, ids, weights, apart, ctx)
        else:
            routed = self._routed(_gather(x, apart), _gather(ids, apart), _gather(weights, apart), ctx)
        shared = tuple(axis for axis in ctx.axes("experts") if axis not in apart) + ctx.axes("expert_ffn")
        routed = lax.psum(routed, shared) if shared else routed
        if apart and not exchanged:
            routed = lax.psum_scatter(routed, apart, scatter_dimension=0, tiled=True)
        return routed if self.shared is None else routed + self.shared(x, ctx)

    def through_cache(
        self, x: Float[Array, "T M"], cache: ExpertCache, number: Int[Array, ""], period: int, ctx: Context
    ) -> tuple[Float[Array, "T M"], ExpertCache]:
        """As a call, with the experts' stacks in host memory: mixture layer `number` reads the cache's slots.

        period: from this layer to the next of the same stacks, in mixture layers.
        """
        ids, weights = self.router(x, ctx)
        gate_up, layer = _stack(self.gate_up)
        down, _ = _stack(self.down)
        experts = gate_up.shape[1]
        local = ids - ctx.shard_index("experts") * experts
        real = jnp.arange(x.shape[0]) < ctx.sequences.cu_q_lens[-1]
        here = real[:, None] & (local >= 0) & (local < experts)

        def read(expert):
            return from_host((gate_up, down), layer, expert, ctx.ops.expert_copies == "stream")

        needed = needed_experts(jnp.where(here, local, -1), experts)
        if ctx.ops.mapped_experts:
            needed = self._ask_for(x, needed, real, cache, number, period, ctx)
        cache, missing = make_room(cache, number, needed)
        expert = jnp.clip(local, 0, experts - 1)
        slots = jnp.where(here, slots_of_layer(cache, number)[expert], -1)
        held = jnp.clip(cache.owner - 1 - number * experts, 0, experts - 1)
        bias, down_bias = (None if p is None else value(p)[held] for p in (self.gate_up_bias, self.down_bias))
        if down_bias is not None:
            down_bias = jnp.where(ctx.shard_index("expert_ffn") == 0, down_bias, 0)

        def product(cache: ExpertCache, ready: Bool[Array, " E"]) -> Float[Array, "T M"]:
            return grouped_ffn(
                x,
                cache.gate_up,
                cache.down,
                jnp.where(ready[expert], slots, -1),
                weights,
                activation=self.spec.activation,
                gate_up_bias=bias,
                down_bias=down_bias,
                scores_on_input=self.spec.router.on_input,
                backend=ctx.ops.attention,
                interpret=ctx.ops.interpret,
                int8_activations=ctx.ops.int8_activations,
                out_dtype="float32",
            )

        if ctx.ops.expert_copies == "first":
            cache = bring_in(cache, read, missing)
            routed = product(cache, needed)
        else:
            at_once, nothing = COPIES_OF_MANY if ids.size > FEW_ROWS else 1, jnp.zeros(x.shape, jnp.float32)
            routed, cache = multiply_while_copying(cache, read, missing, product, at_once, nothing)
        routed = routed.astype(x.dtype)
        axes = ctx.axes("experts") + ctx.axes("expert_ffn")
        routed = lax.psum(routed, axes) if axes else routed
        return (routed if self.shared is None else routed + self.shared(x, ctx)), cache

    def _ask_for(
        self,
        x: Float[Array, "T M"],
        needed: Bool[Array, " E"],
        real: Bool[Array, " T"],
        cache: ExpertCache,
        number: Int[Array, ""],
        period: int,
        ctx: Context,
    ) -> Bool[Array, " E"]:
        """`needed`, once the file's pages of those that are not in slots have been asked for, all at once, and with
        them what the next layer of these stacks is likely to need: what its router says of this layer's input. They
        are read while this layer is computed."""
        gate_up, layer = _stack(self.gate_up)
        down, _ = _stack(self.down)
        leaves, experts = jax.tree.leaves((gate_up, down)), needed.shape[0]
        absent = slots_of_layer(cache, number) < 0
        needed = will_need(leaves, layer, needed & absent, needed)
        ids, _ = following(self.router)(x, ctx)
        local = jnp.where(real[:, None], ids - ctx.shard_index("experts") * experts, -1)
        last = cache.slot_of.shape[0] - 1
        absent = slots_of_layer(cache, jnp.minimum(number + period, last)) < 0
        return will_need(leaves, layer + 1, needed_experts(local, experts) & absent, needed)

    def _exchanged(
        self, x: Float[Array, "T M"], ids: Int[Array, "T k"], weights: Float[Array, "T k"], apart: tuple[str, ...], ctx
    ) -> Float[Array, "T M"]:
        """What the experts of every device along `apart` add to this device's tokens."""
        tokens, choices = ids.shape
        owner = jnp.where(ids < 0, -1, self._place(jnp.maximum(ids, 0), apart, ctx)).reshape(-1)
        plan = exchange.plan_rows(owner, apart, math.prod(ctx.axis_sizes[axis] for axis in apart))

        def run(arrived, held):
            x, ids, weights = arrived
            return self._routed(x, jnp.where(held, ids, -1)[:, None], weights[:, None], ctx)

        rows = (jnp.repeat(x, choices, axis=0), ids.reshape(-1), weights.reshape(-1))
        parts = exchange.exchange_rows(rows, plan, run)
        return parts.reshape(tokens, choices, -1).astype(jnp.float32).sum(axis=1).astype(x.dtype)

    def _place(self, ids: Int[Array, "T k"], apart: tuple[str, ...], ctx: Context) -> Int[Array, "T k"]:
        """Place along the axes `apart` of the devices that hold each expert."""
        shard = ids // _stack(self.gate_up)[0].shape[1]
        place, stride = jnp.zeros_like(ids), 1
        for axis in reversed(ctx.axes("experts")):
            size = ctx.axis_sizes[axis]
            if axis in apart:
                place, stride = place + shard % size * stride, stride * size
            shard = shard // size
        return place

    def _routed(
        self, x: Float[Array, "T M"], ids: Int[Array, "T k"], weights: Float[Array, "T k"], ctx: Context
    ) -> Float[Array, "T M"]:
        """What this device's experts, or its part of them, add to each token."""
        gate_up, layer = _stack(self.gate_up)
        down, _ = _stack(self.down)
        bias = self.gate_up_bias
        local = gate_up.shape[1]
        first_shard = ctx.shard_index("expert_ffn") == 0
        down_bias = None if self.down_bias is None else jnp.where(first_shard, _stack(self.down_bias)[0], 0)
        return grouped_ffn(
            x,
            gate_up,
            down,
            ids,
            weights,
            activation=self.spec.activation,
            gate_up_bias=None if bias is None else _stack(bias)[0],
            down_bias=down_bias,
            scores_on_input=self.spec.router.on_input,
            layer=layer,
            expert_offset=ctx.shard_index("experts") * local,
            backend=ctx.ops.attention,
            interpret=ctx.ops.interpret,
            int8_activations=ctx.ops.int8_activations,
        )


def _gather(x: Array, axes: tuple[str, ...]) -> Array:
    return lax.all_gather(x, axes, axis=0, tiled=True) if axes else x


def _stack(param: nnx.Param):
    """The whole stack of a bound parameter and the layer's number in it."""
    held = param.get_value()
    assert isinstance(held, LayerSlice)
    return held.stack, held.index

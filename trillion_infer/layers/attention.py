"""Grouped-query attention over the paged pool."""

from collections.abc import Mapping
from functools import partial

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from pallas_kernels.common.slot_shard import merge_parts
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from sharding.rules import kv_plan
from trillion_infer.config.model import AttentionSpec, ModelConfig, cache_key
from trillion_infer.layers.context import Context
from trillion_infer.layers.linear import linear
from trillion_infer.layers.norm import RMSNorm, rms_normalise
from trillion_infer.layers.parameters import hold, value
from trillion_infer.layers.pools import Pools, on_pool
from trillion_infer.layers.rope import apply_rope
from trillion_infer.layers.slots import batch_of, slot_shard
from trillion_infer.params.attention import head_plan
from trillion_infer.params.tree import Declared


class Attention(nnx.Module):
    """q, k, v in one product, laid out by physical KV head, with the parameters of `attention_params`."""

    qkv: nnx.Param
    out: nnx.Param
    qkv_bias: nnx.Param | None
    out_bias: nnx.Param | None
    sinks: nnx.Param | None

    def __init__(self, spec: AttentionSpec, config: ModelConfig, declared: Declared, sizes: Mapping[str, int]):
        self.spec = spec
        _, _, self.slot_axis = kv_plan(spec.heads, spec.kv_heads, sizes)
        self.group, self.eps = head_plan(spec, sizes).group, config.norm_eps
        hold(self, declared)
        norm = partial(RMSNorm.optional, eps=config.norm_eps, plus_one=config.norm_plus_one)
        self.q_norm, self.k_norm = norm(declared["q_norm"]), norm(declared["k_norm"])

    def __call__(
        self, x: Float[Array, "T Mi"], pools: Pools, layer: Int[Array, ""], ctx: Context
    ) -> tuple[Float[Array, "T M"], Pools]:
        """Writes the step's keys and values into layer `layer` of this mixer's pool and attends."""
        spec = self.spec
        qkv = linear(x, self.qkv, ctx)
        if self.qkv_bias is not None:
            qkv = qkv + value(self.qkv_bias).astype(qkv.dtype)
        tokens, kv_heads = qkv.shape[:2]
        q = qkv[:, :, : self.group].reshape(tokens, kv_heads * self.group, spec.head_dim)
        k, v = qkv[:, :, self.group], qkv[:, :, self.group + 1]
        q, k = self._position(q, k, ctx)
        place = ctx.cache_index[cache_key(spec)]
        sinks = None if self.sinks is None else value(self.sinks).reshape(-1)
        if self.slot_axis == "shared_slots":
            q = ctx.gather(q, "kv_replicas", axis=1)
            sinks = None if sinks is None else ctx.gather(sinks, "kv_replicas", axis=0)
        out, *lse, pool = on_pool(ragged_paged_attention, 3)(
            ctx.whole_tokens(q),
            ctx.whole_tokens(k),
            ctx.whole_tokens(v),
            pools[place],
            layer,
            *batch_of(ctx, place),
            scale=spec.scale,
            window=spec.window,
            chunk=spec.chunk,
            soft_cap=spec.soft_cap,
            sinks=sinks,
            max_q_len=ctx.max_q_len,
            backend=ctx.ops.attention,
            interpret=ctx.ops.interpret,
            slots=slot_shard(ctx, self.slot_axis),
        )
        if lse:
            out = self._merge(out, lse[0], ctx).astype(q.dtype)
        y = linear(out.reshape(tokens, kv_heads, self.group, spec.head_dim), self.out, ctx, in_axes=3)
        y = ctx.sum_over(y, "kv_heads")
        if self.out_bias is not None:
            y = y + value(self.out_bias).astype(y.dtype)
        return y, (*pools[:place], pool, *pools[place + 1 :])

    def _merge(self, out: Float[Array, "T H D"], lse: Float[Array, "T H"], ctx: Context) -> Float[Array, "t h D"]:
        """The attention over all devices' slots, for this device's heads and tokens."""
        if self.slot_axis == "shared_slots":
            out, lse = merge_parts(out, lse, ctx.axes("kv_replicas"), scatter=1)
        if ctx.axes("slots"):
            out, _ = merge_parts(out, lse, ctx.axes("slots"), scatter=0 if ctx.token_axes else None)
        return out

    def _position(self, q: Array, k: Array, ctx: Context) -> tuple[Array, Array]:
        """Norms and rotations that queries and keys get before they meet."""
        spec = self.spec
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if spec.rope is not None:
            cos, sin = ctx.ropes[spec.rope]
            q = apply_rope(q, cos, sin, spec.rope.interleaved)
            k = apply_rope(k, cos, sin, spec.rope.interleaved)
            if spec.qk_norm == "l2":
                q, k = (rms_normalise(t, self.eps).astype(t.dtype) for t in (q, k))
        elif spec.query_growth is not None:
            scale, floor = spec.query_growth
            positions = ctx.sequences.positions.astype(jnp.float32)
            growth = 1.0 + scale * jnp.log1p(jnp.floor((positions + 1.0) / floor))
            q = (q * growth[:, None, None]).astype(q.dtype)
        return q, k

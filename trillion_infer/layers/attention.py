"""Grouped-query attention over the paged pool."""

from collections.abc import Mapping

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from pallas_kernels.common.slot_shard import merge_parts
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from sharding.heads import HeadPlan
from sharding.rules import SERVE_RULES, kv_plan, shards
from trillion_infer.config.model import AttentionSpec, ModelConfig, cache_key
from trillion_infer.layers.context import Context
from trillion_infer.layers.linear import linear
from trillion_infer.layers.norm import RMSNorm, rms_normalise
from trillion_infer.layers.parameters import WHOLE, Part, stacked, value
from trillion_infer.layers.pools import Pools, on_pool
from trillion_infer.layers.rope import apply_rope
from trillion_infer.layers.slots import batch_of, slot_shard


class Attention(nnx.Module):
    """q, k, v in one product, laid out by physical KV head so that a shard holds whole groups (see HeadPlan).

    qkv: `[K, G+2, D, M]`: the G query heads of KV head k, then its key and its value. out: `[M, K, G, D]`.
    `input_width`: of x where it is not M.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        config: ModelConfig,
        prefixes: tuple[str, ...],
        sizes: Mapping[str, int],
        input_width: int | None = None,
    ):
        self.spec = spec
        plan = HeadPlan(spec.heads, spec.kv_heads, shards(SERVE_RULES, "kv_heads", sizes))
        _, _, self.slot_axis = kv_plan(spec.heads, spec.kv_heads, sizes)
        kv, group, dim, width = plan.physical_kv_heads, plan.group, spec.head_dim, config.width
        wide = input_width or width
        self.group, self.eps = group, config.norm_eps
        head_axes = ("kv_heads", "heads_in_group", "head_dim")
        places = {"q": slice(0, group), "k": group, "v": group + 1}

        def rows(which: str, tail: tuple[int, ...]) -> Part:
            heads = spec.heads if which == "q" else spec.kv_heads
            place = plan.place_queries if which == "q" else plan.place_keys
            return Part((slice(None), places[which]), lambda w: place(w.reshape(heads, dim, *tail)))

        self.qkv = stacked(
            prefixes,
            (kv, group + 2, dim, wide),
            (*head_axes, "embed"),
            {f"{which}_proj.weight": rows(which, (-1,)) for which in places},
            in_axes=1,
        )
        self.out = stacked(
            prefixes,
            (width, kv, group, dim),
            ("embed", *head_axes),
            {"o_proj.weight": Part((), lambda w: _place_out(plan, w, dim))},
            in_axes=3,
        )
        biases = {f"{which}_proj.bias": rows(which, ()) for which in places}
        sinks = {"sinks": Part((), plan.place_queries)}

        def head_norm(name: str) -> RMSNorm:
            return RMSNorm(tuple(p + name for p in prefixes), dim, config.norm_eps, config.norm_plus_one)

        self.qkv_bias = stacked(prefixes, (kv, group + 2, dim), head_axes, biases) if spec.qkv_bias else None
        self.out_bias = stacked(prefixes, (width,), ("embed",), {"o_proj.bias": WHOLE}) if spec.out_bias else None
        self.sinks = stacked(prefixes, (kv, group), head_axes[:2], sinks, dtype="float32") if spec.sinks else None
        self.q_norm = head_norm("q_norm.") if spec.qk_norm == "rms" else None
        self.k_norm = head_norm("k_norm.") if spec.qk_norm == "rms" else None

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


def _place_out(plan: HeadPlan, w, dim: int):
    """o_proj `[M, H*D]` -> `[M, K, G, D]` over physical heads."""
    by_head = w.reshape(w.shape[0], plan.heads, dim)
    if (plan.physical_heads, plan.replicas) == (plan.heads, 1):
        return by_head.reshape(w.shape[0], plan.physical_kv_heads, plan.group, dim)
    return plan.place_queries(by_head.swapaxes(0, 1)).transpose(2, 0, 1, 3)

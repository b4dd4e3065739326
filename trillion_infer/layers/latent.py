"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), computed in latent space over the paged latent pool."""

from functools import partial

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.latent_paged_attention import latent_paged_attention
from trillion_infer.config.model import LatentSpec, cache_key
from trillion_infer.layers.context import Context
from trillion_infer.layers.latent_slots import attend_over_slots
from trillion_infer.layers.linear import linear
from trillion_infer.layers.norm import RMSNorm
from trillion_infer.layers.parameters import hold, value
from trillion_infer.layers.pools import Pools, on_pool
from trillion_infer.layers.rope import apply_rope
from trillion_infer.layers.slots import batch_of, slot_shard
from trillion_infer.params.tree import Declared


class LatentAttention(nnx.Module):
    """The key up-projection is applied to the query and the value up-projection to the output, so that every head
    reads the same latent entries. The parameters are those of `latent_params`."""

    query: nnx.Param
    query_down: nnx.Param | None
    kv_down: nnx.Param
    key_up: nnx.Param
    value_up: nnx.Param
    out: nnx.Param

    def __init__(self, spec: LatentSpec, declared: Declared):
        self.spec = spec
        hold(self, declared)
        self.query_norm = RMSNorm.optional(declared["query_norm"], spec.norm_eps)
        self.kv_norm = RMSNorm(declared["kv_norm"], spec.norm_eps)

    def __call__(
        self, x: Float[Array, "T Mi"], pools: Pools, layer: Int[Array, ""], ctx: Context
    ) -> tuple[Float[Array, "T M"], Pools]:
        """Writes the step's latent entries into layer `layer` of the latent pool and attends."""
        spec = self.spec
        lowered, entry = self._lower(x, ctx)
        query = linear(lowered, self.query, ctx)
        latent, k_rope = self.kv_norm(entry[:, : spec.kv_rank]), entry[:, None, spec.kv_rank :]
        cos, sin = ctx.ropes[spec.rope]
        q_rope = apply_rope(query[:, :, spec.nope_dim :], cos, sin, spec.rope.interleaved)
        k_rope = apply_rope(k_rope, cos, sin, spec.rope.interleaved)[:, 0]
        q_latent = _per_head("thn,hnr->thr", query[:, :, : spec.nope_dim], value(self.key_up))
        place = ctx.cache_index[cache_key(spec)]
        attend = partial(
            on_pool(latent_paged_attention, 4),
            scale=spec.scale,
            max_q_len=ctx.max_q_len,
            backend=ctx.ops.attention,
            interpret=ctx.ops.interpret,
        )
        new, batch = (q_latent, q_rope, latent, k_rope), batch_of(ctx, place)
        if slots := slot_shard(ctx, "latent_slots"):
            mixed, pool = attend_over_slots(partial(attend, slots=slots), new, pools[place], layer, batch, ctx)
        else:
            mixed, pool = attend(*new, pools[place], layer, *batch)
        heads = _per_head("thr,hvr->thv", mixed, value(self.value_up))
        y = ctx.sum_over(linear(heads, self.out, ctx, in_axes=2), "heads")
        return y, (*pools[:place], pool, *pools[place + 1 :])

    def _lower(self, x: Float[Array, "T M"], ctx: Context) -> tuple[Float[Array, "T q"], Float[Array, "T R"]]:
        """What queries come from, and the latent entry with its rotary part before their norm and rotation.

        Both down-projections are split by rows; one gather completes them.
        """
        entry_dim = self.spec.kv_rank + self.spec.rope_dim
        entry = linear(x, self.kv_down, ctx)
        if self.query_down is None or self.query_norm is None:
            return x, ctx.gather(entry, "latent_rows", axis=1)[:, :entry_dim]
        query = linear(x, self.query_down, ctx)
        both = ctx.gather(jnp.concatenate((query, entry), axis=1)[:, None], "latent_rows", axis=1)
        query_dim, rows = self.spec.q_rank, query.shape[1]
        query, entry = (part.reshape(x.shape[0], -1) for part in (both[:, :, :rows], both[:, :, rows:]))
        return self.query_norm(query[:, :query_dim]), entry[:, :entry_dim]


def _per_head(equation: str, x: Array, weight: Array) -> Array:
    """One matrix a head, summed in float32, in the dtype of x."""
    exact = x.dtype == jnp.float32
    precision = lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT
    weight = weight.astype(x.dtype)
    return jnp.einsum(equation, x, weight, precision=precision, preferred_element_type=jnp.float32).astype(x.dtype)

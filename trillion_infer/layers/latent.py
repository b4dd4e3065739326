"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), computed in latent space over the paged latent pool."""

from collections.abc import Mapping
from functools import partial

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.latent_paged_attention import latent_paged_attention
from sharding.heads import round_up
from sharding.rules import SERVE_RULES, shards
from trillion_infer.config.model import LatentSpec, ModelConfig, cache_key
from trillion_infer.layers.context import Context
from trillion_infer.layers.latent_slots import attend_over_slots
from trillion_infer.layers.linear import linear
from trillion_infer.layers.norm import RMSNorm
from trillion_infer.layers.parameters import Part, stacked, value
from trillion_infer.layers.pools import Pools, on_pool
from trillion_infer.layers.rope import apply_rope
from trillion_infer.layers.slots import batch_of, slot_shard


class LatentAttention(nnx.Module):
    """The key up-projection is applied to the query and the value up-projection to the output, so that every head
    reads the same latent entries. Heads are padded with zeros to a multiple of the shards.

    query: `[H, nope+rope, q_rank or M]`. key_up: `[H, nope, R]`, value_up: `[H, v, R]`. out: `[M, H, v]`.
    `input_width`: of x where it is not M.
    """

    def __init__(
        self,
        spec: LatentSpec,
        config: ModelConfig,
        prefixes: tuple[str, ...],
        sizes: Mapping[str, int],
        input_width: int | None = None,
    ):
        self.spec = spec
        tensor = shards(SERVE_RULES, "heads", sizes)
        width, heads, rank = config.width, round_up(spec.heads, tensor), spec.kv_rank
        wide = input_width or width
        real = slice(0, spec.heads)
        query_dim, per_head = spec.nope_dim + spec.rope_dim, spec.nope_dim + spec.value_dim

        def norm(name: str, size: int) -> RMSNorm:
            return RMSNorm(tuple(p + name for p in prefixes), size, spec.norm_eps)

        low_rank = spec.q_rank is not None
        query_in = spec.q_rank or wide
        rows = ("latent_rows", "embed")
        query_down = {"q_a_proj.weight": Part((slice(0, query_in),))}
        query_rows = round_up(query_in, tensor)
        self.query_down = stacked(prefixes, (query_rows, wide), rows, query_down, in_axes=1) if low_rank else None
        self.query_norm = norm("q_a_layernorm.", query_in) if low_rank else None
        query_name = "q_b_proj.weight" if low_rank else "q_proj.weight"
        query = {query_name: Part((real,), lambda w: w.reshape(spec.heads, query_dim, query_in))}
        self.query = stacked(prefixes, (heads, query_dim, query_in), ("heads", "head_dim", "latent"), query, in_axes=1)
        down = {"kv_a_proj_with_mqa.weight": Part((slice(0, rank + spec.rope_dim),))}
        kv_rows = round_up(rank + spec.rope_dim, tensor)
        self.kv_down = stacked(prefixes, (kv_rows, wide), rows, down, in_axes=1)
        self.kv_norm = norm("kv_a_layernorm.", rank)

        def up(part: slice) -> dict[str, Part]:
            return {"kv_b_proj.weight": Part((real,), lambda w: w.reshape(spec.heads, per_head, rank)[:, part])}

        axes = ("heads", "head_dim", "latent")
        self.key_up = stacked(prefixes, (heads, spec.nope_dim, rank), axes, up(slice(0, spec.nope_dim)))
        self.value_up = stacked(prefixes, (heads, spec.value_dim, rank), axes, up(slice(spec.nope_dim, per_head)))
        out = {"o_proj.weight": Part((slice(None), real), lambda w: w.reshape(width, spec.heads, spec.value_dim))}
        axes = ("embed", "heads", "head_dim")
        self.out = stacked(prefixes, (width, heads, spec.value_dim), axes, out, in_axes=2)

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
        query_dim, rows = self.query_norm.width, query.shape[1]
        query, entry = (part.reshape(x.shape[0], -1) for part in (both[:, :, :rows], both[:, :, rows:]))
        return self.query_norm(query[:, :query_dim]), entry[:, :entry_dim]


def _per_head(equation: str, x: Array, weight: Array) -> Array:
    """One matrix a head, summed in float32, in the dtype of x."""
    exact = x.dtype == jnp.float32
    precision = lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT
    weight = weight.astype(x.dtype)
    return jnp.einsum(equation, x, weight, precision=precision, preferred_element_type=jnp.float32).astype(x.dtype)

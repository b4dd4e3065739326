"""Token embeddings and the output head, split by vocabulary."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from pallas_kernels.quantised_matmul import QuantisedTensor, dequantise
from trillion_infer.config.model import ModelConfig
from trillion_infer.layers.context import Context
from trillion_infer.layers.linear import linear
from trillion_infer.layers.parameters import hold
from trillion_infer.params.tree import Declared


class Embedding(nnx.Module):
    """table `[V, M]`, plain or int8: rows of tokens; tied models use it for the logits too."""

    table: nnx.Param

    def __init__(self, config: ModelConfig, declared: Declared):
        self.vocab, self.scale = config.vocab, config.embed_scale
        hold(self, declared)

    def __call__(self, tokens: Int[Array, "T"], ctx: Context) -> Float[Array, "T M"]:
        """Rows of the tokens. Each shard looks up the ids it holds; the others' rows come by the sum."""
        table = self.table.get_value()
        local = tokens - ctx.shard_index("vocab") * table.shape[0]
        held = (local >= 0) & (local < table.shape[0])
        rows = _rows(table, jnp.where(held, local, 0))
        rows = ctx.sum_over(jnp.where(held[:, None], rows, 0).astype(ctx.ops.dtype), "vocab")
        if self.scale == 1.0:
            return rows
        dtype = rows.dtype if isinstance(table, QuantisedTensor) else table.dtype
        return rows * jnp.asarray(self.scale, dtype).astype(rows.dtype)

    def logits(self, x: Float[Array, "R M"], ctx: Context, cap: float | None) -> Float[Array, "R V_shard"]:
        """float32 logits of this shard's part of the vocabulary; padding is -inf."""
        out = linear(x, self.table, ctx, dtype=jnp.float32)
        if cap is not None:
            out = cap * jnp.tanh(out / cap)
        ids = ctx.shard_index("vocab") * out.shape[1] + jnp.arange(out.shape[1])
        return jnp.where(ids[None, :] < self.vocab, out, -jnp.inf)


def _rows(table: Array | QuantisedTensor, ids: Int[Array, "T"]) -> Float[Array, "T M"]:
    picked = jax.tree.map(lambda leaf: jnp.take(leaf, ids, axis=0), table)
    return dequantise(picked) if isinstance(picked, QuantisedTensor) else picked

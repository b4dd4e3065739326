"""Token embeddings and the output head, split by vocabulary."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from pallas_kernels.quantised_matmul import QuantisedTensor, dequantise
from sharding.heads import round_up
from trillion_infer.config.model import ModelConfig
from trillion_infer.layers.context import Context
from trillion_infer.layers.linear import linear
from trillion_infer.layers.parameters import Part, single

VOCAB_MULTIPLE = 128
"""The vocabulary is padded to this many times the shards: whole lanes, whole words of the mask."""


def padded_vocab(vocab: int, shards: int) -> int:
    return round_up(vocab, VOCAB_MULTIPLE * shards)


class Embedding(nnx.Module):
    """table `[V, M]`, plain or int8: rows of tokens; tied models use it for the logits too."""

    def __init__(self, config: ModelConfig, name: str, shards: int):
        self.vocab, self.scale = config.vocab, config.embed_scale
        shape = (padded_vocab(config.vocab, shards), config.width)
        self.table = single(shape, ("vocab", "embed"), name, Part((slice(0, config.vocab),)), in_axes=1)

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

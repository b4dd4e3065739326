"""EAGLE-3 (arXiv 2503.01840): one layer fed with a token's embedding and three hidden states of the target."""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from sharding.rules import SERVE_RULES, shards
from trillion_infer.config.drafter import Eagle3Spec
from trillion_infer.config.model import AttentionSpec, DenseSpec
from trillion_infer.layers.attention import Attention
from trillion_infer.layers.context import Ops
from trillion_infer.layers.decoder import Decoder
from trillion_infer.layers.draft.base import DraftInputs, DraftModel, Params, Pools, first_best
from trillion_infer.layers.embedding import Embedding
from trillion_infer.layers.ffn import GatedFFN
from trillion_infer.layers.latent import LatentAttention
from trillion_infer.layers.linear import linear
from trillion_infer.layers.norm import RMSNorm
from trillion_infer.layers.parameters import bind, hold, value
from trillion_infer.params.attention import attention_params
from trillion_infer.params.blocks import embedding_params, ffn_params, norm_params
from trillion_infer.params.latent import latent_params
from trillion_infer.params.tree import WHOLE, stacked


class Eagle3Layer(nnx.Module):
    """fc: `[M, 3M]`. The layer reads `[embedding, states]`, each normed; d2t `[Vd]`: target id of its id i, less i."""

    fc: nnx.Param
    d2t: nnx.Param | None

    def __init__(self, spec: Eagle3Spec, sizes: Mapping[str, int]):
        config = spec.config
        layer, width = config.layers[0], config.width

        def norm(name: str) -> RMSNorm:
            return RMSNorm(norm_params((name,), width), config.norm_eps)

        attention, ffn = ((spec.prefix + name,) for name in ("self_attn.", "mlp."))
        self.mixer = (
            Attention(layer.mixer, config, attention_params(layer.mixer, config, attention, sizes, 2 * width), sizes)
            if isinstance(layer.mixer, AttentionSpec)
            else LatentAttention(layer.mixer, latent_params(layer.mixer, config, attention, sizes, 2 * width))
        )
        assert isinstance(layer.ffn, DenseSpec)
        self.ffn = GatedFFN(layer.ffn, ffn_params(layer.ffn, config, ffn, shards(SERVE_RULES, "ffn", sizes)))
        self.token_norm, self.state_norm = norm(spec.prefix + "input_layernorm."), norm(spec.prefix + "hidden_norm.")
        self.ffn_norm, self.norm = norm(spec.prefix + "post_attention_layernorm."), norm("norm.")
        wide = 3 * spec.target_width
        ids = stacked(("",), (config.vocab,), (None,), {"d2t": WHOLE}, dtype="int32", init="zeros")
        fc = stacked(("",), (width, wide), ("embed", "latent"), {"fc.weight": WHOLE})
        hold(self, {"fc": fc, "d2t": ids if spec.pruned else None})


class Eagle3Module(nnx.Module):
    """The head's parameters: its layer, its output embedding, and its input embedding if it has one."""

    def __init__(self, spec: Eagle3Spec, sizes: Mapping[str, int]):
        self.layer = Eagle3Layer(spec, sizes)
        parts = shards(SERVE_RULES, "vocab", sizes)
        self.head = Embedding(spec.config, embedding_params(spec.config, "lm_head.weight", parts))
        tokens = dataclasses.replace(spec.config, vocab=spec.target_vocab)
        embed = embedding_params(tokens, "embed_tokens.weight", parts)
        self.embed = Embedding(tokens, embed) if spec.own_embed else None


class Eagle3(DraftModel):
    """A head for `target`; reads the target's embedding unless it has one."""

    def __init__(self, spec: Eagle3Spec, target: Decoder, sizes: Mapping[str, int], ops: Ops):
        super().__init__(sizes, ops)
        self.config = spec.config
        self.module = Eagle3Module(spec, sizes)
        self.aux_layers = spec.aux_of(len(target.config.layers))
        self._embed = target.embed if self.module.embed is None else self.module.embed
        self.borrowed = {"embed.table": "embed.table"} if self.module.embed is None else {}

    def begin(self, params: Params, hidden, aux: tuple[Float[Array, "T M"], ...]) -> Float[Array, "T M"]:
        return linear(jnp.concatenate(aux, axis=1), self._layer(params).fc, self.bare_context())

    def run(self, params: Params, pools: Pools, inputs: DraftInputs) -> tuple[Float[Array, "T M"], Pools]:
        assert inputs.states is not None
        ctx, layer, states = self.context(inputs), self._layer(params), inputs.states
        embedded = bind(self._embed, params, "embed.")(inputs.tokens, ctx)
        x = jnp.concatenate([layer.token_norm(embedded), layer.state_norm(states)], axis=1)
        mixed, pools = layer.mixer(x, pools, jnp.int32(0), ctx)
        out = states + mixed
        return out + layer.ffn(layer.ffn_norm(out), ctx), pools

    def best(self, params: Params, states: Float[Array, "S M"]) -> tuple[Int[Array, "S"], Float[Array, "S"]]:
        ctx, layer = self.bare_context(), self._layer(params)
        token, chance = first_best(self.logits(params, states), ctx)
        return token if layer.d2t is None else token + value(layer.d2t)[token], chance

    def logits(self, params: Params, states: Float[Array, "S M"]) -> Float[Array, "S V_shard"]:
        """Logits over the head's own vocabulary."""
        head = bind(self.module.head, params, "head.")
        return head.logits(self._layer(params).norm(states), self.bare_context(), None)

    def _layer(self, params: Params) -> Eagle3Layer:
        return bind(self.module.layer, params, "layer.", jnp.int32(0))

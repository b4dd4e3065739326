"""An EAGLE-3 head as a plain function of its checkpoint's tensors, and its training-time test (arXiv 2503.01840).

Letters: B rows, T positions, N places of them, M width, H heads, K KV heads, D head dim, V drafted vocabulary, j step
of the unroll.

Index p is where a chain begins. In step j it takes token p + 1 + j at position p + j, with the states of step j - 1 at
p (step 0: those of the target), and predicts token p + 2 + j. It attends to the keys of step 0 up to p, and to its own
of the steps since.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from trillion_infer.config.drafter import Eagle3Spec
from trillion_infer.config.model import AttentionSpec
from trillion_infer.layers.norm import rms_normalise
from trillion_infer.layers.rope import apply_rope, rope_tables

Weights = Mapping[str, Float[Array, "..."]]
LAYER = "midlayer."


@dataclass(frozen=True)
class Batch:
    """What is drafted for. tokens `[B, T]`; aux `[B, T, 3M]` and hidden `[B, T, M]`: the target's states; answers
    `[B]`: where the answer begins; lengths `[B]`."""

    tokens: Int[Array, "B T"]
    aux: Float[Array, "B T 3M"]
    hidden: Float[Array, "B T M"]
    answers: Int[Array, "B"]
    lengths: Int[Array, "B"]


@dataclass(frozen=True)
class Ends:
    """The target's embedding `[Vt, M]`, its output rows of the drafted vocabulary `[V, M]`, and for each of its tokens
    the place there, -1 for none."""

    embedding: Float[Array, "Vt M"]
    output: Float[Array, "V M"]
    places: Int[Array, "Vt"]


@dataclass(frozen=True)
class Drafted:
    """Of each step: the share of right tokens. length: mean tokens that a verification gives, the target's own
    included, of the chains that the text does not cut short; walked: the same of the chains that an engine would begin,
    each behind what the one before gave. Hard places are more of those, easy ones being passed over."""

    right: Float[Array, "j"]
    length: Float[Array, ""]
    walked: Float[Array, ""]


for _each in (Batch, Ends, Drafted):
    jax.tree_util.register_dataclass(_each)


def unrolled(
    weights: Weights, spec: Eagle3Spec, ends: Ends, batch: Batch, steps: int, window: int, decay: float = 0.8
) -> tuple[Float[Array, ""], Drafted]:
    """The loss, cross-entropy to the target's distribution weighted by decay^j, and what was right.

    Chains begin at the `window` places from the last token of the prompt on; only there is more computed than keys.
    Counted are those inside answers, whose next token the drafted vocabulary has; right: the likeliest is it.
    """
    places = batch.answers[:, None] - 1 + jnp.arange(window)[None, :]
    layer = _Layer(weights, spec)
    states = batch.aux.astype(jnp.float32) @ weights["fc.weight"].T
    all_places = jnp.broadcast_to(jnp.arange(batch.tokens.shape[1]), batch.tokens.shape)
    x = layer.joined(ends.embedding[_at(batch.tokens, all_places + 1)], states)
    seen = layer.keys_values(x, all_places)
    x, states = _at(x, places), _at(states, places)
    ahead = _at(batch.hidden, batch.answers[:, None] + jnp.arange(window + steps - 1)[None, :]).astype(jnp.float32)
    wanted = jax.nn.softmax(ahead @ ends.output.T)
    own: list[tuple[Array, Array]] = []
    losses, right, stands = [], [], jnp.ones(places.shape, bool)
    lengths = jnp.ones(places.shape)
    for j in range(steps):
        if j:
            x = layer.joined(ends.embedding[_at(batch.tokens, places + 1 + j)], states)
            own.append(layer.keys_values(x, places + j))
        states = layer.run(x, states, places, j, seen, own)
        logits = _norm(states, weights["norm.weight"], spec.config.norm_eps) @ weights["lm_head.weight"].T
        labels = ends.places[_at(batch.tokens, places + 2 + j)]
        inside = places + 2 + j < batch.lengths[:, None]
        each = -(wanted[:, j : j + window] * jax.nn.log_softmax(logits)).sum(-1)
        losses.append(decay**j * _mean(each, inside & (labels >= 0)))
        hits = logits.argmax(-1) == labels
        right.append(_mean(hits, inside))
        stands = stands & hits
        lengths = lengths + stands
    whole = places + 1 + steps < batch.lengths[:, None]
    return jnp.stack(losses).sum() / sum(decay**j for j in range(steps)), Drafted(
        jnp.stack(right), _mean(lengths, whole), _mean(lengths, whole & begun(lengths))
    )


def begun(lengths: Float[Array, "B N"]) -> Bool[Array, "B N"]:
    """Places at which an engine begins a chain: the first, and then always `lengths` further."""

    def one(following: Array, column: tuple[Array, Array]) -> tuple[Array, Array]:
        place, length = column
        here = following == place
        return jnp.where(here, place + length, following), here

    columns = jnp.arange(lengths.shape[1]), lengths.T.astype(jnp.int32)
    return jax.lax.scan(one, jnp.zeros(lengths.shape[0], jnp.int32), columns)[1].T


class _Layer:
    """The head's layer over places `[B, N]` of sequences."""

    def __init__(self, weights: Weights, spec: Eagle3Spec):
        mixer = spec.config.layers[0].mixer
        assert isinstance(mixer, AttentionSpec)
        assert mixer.rope is not None
        self._mixer, self._rope, self._eps = mixer, mixer.rope, spec.config.norm_eps
        self._w = {name.removeprefix(LAYER): value for name, value in weights.items() if name.startswith(LAYER)}

    def joined(self, embedded: Float[Array, "B N M"], states: Float[Array, "B N M"]) -> Float[Array, "B N 2M"]:
        """The layer's input: the embedding of the token that follows, and the states, each normed."""
        w = self._w
        token = _norm(embedded.astype(jnp.float32), w["input_layernorm.weight"], self._eps)
        return jnp.concatenate([token, _norm(states, w["hidden_norm.weight"], self._eps)], axis=-1)

    def keys_values(self, x: Float[Array, "B N 2M"], positions: Int[Array, "B N"]) -> tuple[Array, Array]:
        """`[B, N, K, D]` each."""
        count = self._mixer.kv_heads
        return self._turned(self._heads(x, "k", count), positions), self._heads(x, "v", count)

    def run(
        self, x: Array, states: Array, places: Array, j: int, seen: tuple[Array, Array], own: list[tuple[Array, Array]]
    ) -> Float[Array, "B N M"]:
        """Step j at `places + j`: sees the keys of step 0 up to `places`, and those of the steps since there."""
        mixer, w = self._mixer, self._w
        rows, count = places.shape
        shape = (rows, count, mixer.kv_heads, -1, mixer.head_dim)
        q = (self._turned(self._heads(x, "q", mixer.heads), places + j) * mixer.scale).reshape(shape)
        scores = jnp.einsum("bqkgd,bskd->bkgqs", q, seen[0])
        visible = jnp.arange(seen[0].shape[1])[None, None, :] <= places[:, :, None]
        scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
        more = [jnp.einsum("bqkgd,bqkd->bkgq", q, keys)[..., None] for keys, _ in own]
        probs = jax.nn.softmax(jnp.concatenate([scores, *more], axis=-1), axis=-1)
        mixed = jnp.einsum("bkgqs,bskd->bqkgd", probs[..., : seen[0].shape[1]], seen[1])
        for step, (_, values) in enumerate(own):
            mixed = mixed + jnp.einsum("bkgq,bqkd->bqkgd", probs[..., seen[0].shape[1] + step], values)
        out = states + mixed.reshape(rows, count, -1) @ w["self_attn.o_proj.weight"].T
        y = _norm(out, w["post_attention_layernorm.weight"], self._eps)
        fed = jax.nn.silu(y @ w["mlp.gate_proj.weight"].T) * (y @ w["mlp.up_proj.weight"].T)
        return out + fed @ w["mlp.down_proj.weight"].T

    def _heads(self, x: Array, name: str, count: int) -> Float[Array, "B N H D"]:
        return (x @ self._w[f"self_attn.{name}_proj.weight"].T).reshape(*x.shape[:2], count, self._mixer.head_dim)

    def _turned(self, x: Float[Array, "B N H D"], positions: Int[Array, "B N"]) -> Float[Array, "B N H D"]:
        flat = positions.ravel().astype(jnp.int32)
        cos, sin = rope_tables(self._rope, flat, flat + 1)
        return apply_rope(x.reshape(-1, *x.shape[2:]), cos, sin, self._rope.interleaved).reshape(x.shape)


def weight_shapes(spec: Eagle3Spec) -> dict[str, tuple[int, ...]]:
    """Every trained tensor of a head, by its name in the checkpoint."""
    config = spec.config
    layer, m = config.layers[0], config.width
    assert isinstance(layer.mixer, AttentionSpec)
    wide, narrow = layer.mixer.heads * layer.mixer.head_dim, layer.mixer.kv_heads * layer.mixer.head_dim
    ffn = layer.ffn.width
    inner = {
        "self_attn.q_proj": (wide, 2 * m),
        "self_attn.k_proj": (narrow, 2 * m),
        "self_attn.v_proj": (narrow, 2 * m),
        "self_attn.o_proj": (m, wide),
        "mlp.gate_proj": (ffn, m),
        "mlp.up_proj": (ffn, m),
        "mlp.down_proj": (m, ffn),
        **dict.fromkeys(("input_layernorm", "hidden_norm", "post_attention_layernorm"), (m,)),
    }
    outer = {"fc.weight": (m, 3 * spec.target_width), "norm.weight": (m,), "lm_head.weight": (config.vocab, m)}
    return {**{f"{LAYER}{name}.weight": shape for name, shape in inner.items()}, **outer}


def random_weights(spec: Eagle3Spec, seed: int) -> dict[str, Float[Array, "..."]]:
    """Norms of ones, matrices of variance one over their input width."""
    weights = {}
    for number, (name, shape) in enumerate(sorted(weight_shapes(spec).items())):
        key = jax.random.fold_in(jax.random.key(seed), number)
        matrix = len(shape) == 2
        weights[name] = jax.random.normal(key, shape) / math.sqrt(shape[-1]) if matrix else jnp.ones(shape)
    return weights


def _norm(x: Array, weight: Array, eps: float) -> Array:
    return rms_normalise(x, eps) * weight


def _at(x: Float[Array, "B T ..."], places: Int[Array, "B N"]) -> Float[Array, "B N ..."]:
    """What x has at the places of each row; beyond its end the last, of no meaning."""
    return jax.vmap(lambda row, where: row[where])(x, jnp.minimum(places, x.shape[1] - 1))


def _mean(x: Array, where: Bool[Array, "B N"]) -> Float[Array, ""]:
    return jnp.where(where, x, 0).sum() / jnp.maximum(where.sum(), 1)

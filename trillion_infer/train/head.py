"""An EAGLE-3 head as a plain function of its checkpoint's tensors, and its training-time test (arXiv 2503.01840).

Letters: B rows, T positions, M width, H heads, K KV heads, D head dim, V drafted vocabulary, j step of the unroll.

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
    """tokens `[B, T]`; aux `[B, T, 3M]`; wanted `[B, T, V]`: the target's distribution after each position, over the
    drafted vocabulary; labels `[B, T]`: the place there of the token after it, -1 if it is not among them; answers
    `[B]`: where the answer begins; lengths `[B]`."""

    tokens: Int[Array, "B T"]
    aux: Float[Array, "B T 3M"]
    wanted: Float[Array, "B T V"]
    labels: Int[Array, "B T"]
    answers: Int[Array, "B"]
    lengths: Int[Array, "B"]


jax.tree_util.register_dataclass(Batch)


def unrolled(
    weights: Weights, spec: Eagle3Spec, embedding: Float[Array, "Vt M"], batch: Batch, steps: int, decay: float = 0.8
) -> tuple[Float[Array, ""], Float[Array, "j"]]:
    """The loss, cross-entropy to the target's distribution weighted by decay^j, and each step's share of right tokens.

    Counted are positions inside answers, whose next token the drafted vocabulary has; right: the likeliest is it.
    """
    states = batch.aux @ weights["fc.weight"].T
    index = jnp.arange(batch.tokens.shape[1])[None, :]
    keys: list[Array] = []
    values: list[Array] = []
    losses, right = [], []
    for j in range(steps):
        embedded = embedding[_ahead(batch.tokens, 1 + j)].astype(jnp.float32)
        states = _layer(weights, spec, embedded, states, j, keys, values)
        normed = _norm(states, weights["norm.weight"], spec.config.norm_eps)
        logits = normed @ weights["lm_head.weight"].T
        labels = _ahead(batch.labels, 1 + j)
        inside = (index + 1 >= batch.answers[:, None]) & (index + 2 + j < batch.lengths[:, None])
        learnt = inside & (labels >= 0)
        each = -(_ahead(batch.wanted, 1 + j) * jax.nn.log_softmax(logits)).sum(-1)
        losses.append(decay**j * _mean(each, learnt))
        right.append(_mean(logits.argmax(-1) == labels, inside))
    return jnp.stack(losses).sum() / sum(decay**j for j in range(steps)), jnp.stack(right)


def _layer(
    weights: Weights, spec: Eagle3Spec, embedded: Array, states: Array, j: int, keys: list[Array], values: list[Array]
) -> Float[Array, "B T M"]:
    """One step of the layer; appends its keys and values."""
    config, mixer = spec.config, spec.config.layers[0].mixer
    assert isinstance(mixer, AttentionSpec)
    assert mixer.rope is not None
    w = {name.removeprefix(LAYER): value for name, value in weights.items() if name.startswith(LAYER)}
    eps = config.norm_eps
    x = jnp.concatenate(
        [_norm(embedded, w["input_layernorm.weight"], eps), _norm(states, w["hidden_norm.weight"], eps)], axis=-1
    )
    rows, length = x.shape[:2]
    positions = jnp.arange(length, dtype=jnp.int32) + j
    cos, sin = rope_tables(mixer.rope, positions, positions + 1)

    def heads(name: str, count: int) -> Float[Array, "B T N D"]:
        return (x @ w[f"self_attn.{name}_proj.weight"].T).reshape(rows, length, count, mixer.head_dim)

    def turn(y: Array) -> Array:
        return jax.vmap(lambda row: apply_rope(row, cos, sin, mixer.rope.interleaved))(y)  # pyright: ignore

    group = mixer.heads // mixer.kv_heads
    q = turn(heads("q", mixer.heads)) * mixer.scale
    keys.append(jnp.repeat(turn(heads("k", mixer.kv_heads)), group, axis=2))
    values.append(jnp.repeat(heads("v", mixer.kv_heads), group, axis=2))
    visible = jnp.tril(jnp.ones((length, length), bool))
    scores = jnp.where(visible, jnp.einsum("bqhd,bkhd->bhqk", q, keys[0]), -jnp.inf)
    own = [jnp.einsum("bqhd,bqhd->bhq", q, k)[..., None] for k in keys[1:]]
    probs = jax.nn.softmax(jnp.concatenate([scores, *own], axis=-1), axis=-1)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", probs[..., :length], values[0])
    for step, v in enumerate(values[1:]):
        mixed = mixed + probs[..., length + step].swapaxes(1, 2)[..., None] * v
    out = states + mixed.reshape(rows, length, -1) @ w["self_attn.o_proj.weight"].T
    y = _norm(out, w["post_attention_layernorm.weight"], eps)
    fed = jax.nn.silu(y @ w["mlp.gate_proj.weight"].T) * (y @ w["mlp.up_proj.weight"].T)
    return out + fed @ w["mlp.down_proj.weight"].T


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


def _ahead(x: Array, by: int) -> Array:
    """x with index p holding what was at p + by; the last `by` are of no meaning."""
    return jnp.roll(x, -by, axis=1)


def _mean(x: Array, where: Bool[Array, "B T"]) -> Float[Array, ""]:
    return jnp.where(where, x, 0).sum() / jnp.maximum(where.sum(), 1)

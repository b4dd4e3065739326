"""From the model's logits to the logits that are drawn from: mask, bias, penalties, then temperature."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from trillion_infer.sample.rows import RowParams


def allowed_bits(mask: UInt[Array, "R W"], vocab: int) -> Bool[Array, "R V"]:
    """Bit v % 32 of word v // 32, for each token v."""
    bits = (mask[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None, :]) & 1
    return bits.reshape(mask.shape[0], -1)[:, :vocab] != 0


def apply_mask(logits: Float[Array, "R V"], mask: UInt[Array, "R W"]) -> Float[Array, "R V"]:
    return jnp.where(allowed_bits(mask, logits.shape[1]), logits, -jnp.inf)


def apply_penalties(
    logits: Float[Array, "R V"], counts: Int[Array, "R V"], prompt: Bool[Array, "R V"], rows: RowParams
) -> Float[Array, "R V"]:
    """Repetition on prompt and output (positive logits divided, negative multiplied: arXiv 1909.05858, section 4.1,
    as transformers does), then presence and frequency on output only."""
    repetition = rows.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(prompt | (counts > 0), repeated, logits)
    present = (counts > 0).astype(jnp.float32)
    return logits - rows.frequency[:, None] * counts.astype(jnp.float32) - rows.presence[:, None] * present


def scale(logits: Float[Array, "R V"], top: Float[Array, "R"], rows: RowParams) -> Float[Array, "R V"]:
    """Logits less their maximum `top`, over the temperature, so the likeliest is 0 and nothing overflows; tokens less
    likely than min_p of it are -inf."""
    temperature = jnp.where(rows.greedy, 1.0, rows.temperature)
    scaled = (logits - top[:, None]) / temperature[:, None]
    return jnp.where(scaled >= jnp.log(rows.min_p)[:, None], scaled, -jnp.inf)


def any_of(*conditions: Bool[Array, "R"]) -> Bool[Array, ""]:
    """Some row meets every condition."""
    met = conditions[0]
    for condition in conditions[1:]:
        met &= condition
    return jnp.any(met)

"""Log-probabilities of tokens under the raw logits: before masks, penalties and temperature."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from trillion_infer.core.sampling_params import MAX_LOGPROBS
from trillion_infer.sample.filters import row_sum

LOGPROB_FLOOR = -9999.0
"""Reported where a probability is 0, so that every figure is finite (JSON has no infinities)."""

Scores = tuple[Float[Array, "R"], Int[Array, "R"], Int[Array, "R k"], Float[Array, "R k"]]


def score(logits: Float[Array, "R V"], targets: Int[Array, "R"], k: int = MAX_LOGPROBS) -> Scores:
    """(logprob, rank, top_ids, top_logprobs) of each target; rank 1 is the likeliest and equals share the better.

    The k alternatives are in falling order; where the vocabulary is smaller, the rest is id -1 at LOGPROB_FLOOR.
    """
    top = jnp.max(logits, axis=1)
    log_total = jnp.log(row_sum(jnp.exp(logits - top[:, None]))) + top
    chosen = jnp.take_along_axis(logits, targets[:, None], axis=1)
    rank = (logits > chosen).sum(axis=1) + 1
    count = min(k, logits.shape[1])
    values, ids = jax.lax.top_k(logits, count)
    missing = ((0, 0), (0, k - count))
    values = jnp.pad(values - log_total[:, None], missing, constant_values=LOGPROB_FLOOR)
    ids = jnp.pad(ids, missing, constant_values=-1)
    return _finite(chosen[:, 0] - log_total), rank, ids, _finite(values)


def no_scores(rows: int, k: int = MAX_LOGPROBS) -> Scores:
    """What `score` gives, for a step in which nobody asks."""
    zeros, ids = jnp.zeros(rows, jnp.float32), jnp.full((rows, k), -1, jnp.int32)
    return zeros, jnp.zeros(rows, jnp.int32), ids, jnp.zeros((rows, k), jnp.float32)


def _finite(logprobs: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.maximum(jnp.where(jnp.isnan(logprobs), LOGPROB_FLOOR, logprobs), LOGPROB_FLOOR)

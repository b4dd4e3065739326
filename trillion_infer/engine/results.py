"""What a step chose, from the devices to the host."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np

from trillion_infer.core.outputs import Logprob
from trillion_infer.sample import Sampled, Verified


def new_tokens(sampled: Sampled | Verified) -> list[list[int]]:
    """The new tokens of each row."""
    if isinstance(sampled, Verified):
        counts = np.asarray(sampled.num_tokens).tolist()
        return [row[:n] for row, n in zip(np.asarray(sampled.tokens).tolist(), counts, strict=True)]
    return [[token] for token in np.asarray(sampled.token).tolist()]


def fetch_scores(sampled: Sampled | Verified) -> Sampled | Verified:
    """On the host, with one entry a position."""
    found = jax.device_get(sampled)
    if isinstance(found, Sampled):
        return found
    names = ("logprob", "rank", "top_ids", "top_logprobs")
    return replace(found, **{name: np.concatenate(getattr(found, name)) for name in names})


def read_logprobs(scores: Any, place: int, token: int, count: int) -> dict[int, Logprob]:
    """The chosen token and the `count` likeliest of one row, from host arrays of a Sampled or of `score`."""
    found = {token: Logprob(float(scores.logprob[place]), int(scores.rank[place]))}
    for rank, (other, value) in enumerate(
        zip(scores.top_ids[place][:count].tolist(), scores.top_logprobs[place][:count].tolist(), strict=True), start=1
    ):
        if other not in found:
            found[other] = Logprob(value, rank)
    return found

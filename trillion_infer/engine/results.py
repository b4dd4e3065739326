"""A step on the devices, and what it chose on its way to the host."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from trillion_infer.core.outputs import Logprob
from trillion_infer.engine.buckets import Bucket
from trillion_infer.engine.prompt_scores import ScoreBlock
from trillion_infer.sample import Sampled, Verified
from trillion_infer.schedule.plan import Row

if TYPE_CHECKING:
    from trillion_infer.engine.drafting import Drafted


@dataclass
class Pending:
    """A step sent to the device. `rows[i]` is the request row whose result stands at place `places[i]`.

    begun: when its preparation began; None where that included compiling, or something was compiled beside it.
    """

    bucket: Bucket
    rows: list[Row]
    places: list[int]
    sampled: Sampled | Verified
    begun: float | None
    scores: list[ScoreBlock] = field(default_factory=list)
    drafted: "list[Drafted]" = field(default_factory=list)

    @property
    def is_ready(self) -> bool:
        tokens = self.sampled.tokens if isinstance(self.sampled, Verified) else self.sampled.token
        return tokens.is_ready()  # pyright: ignore[reportAttributeAccessIssue]


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

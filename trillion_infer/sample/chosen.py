"""What a step chose, as its programs return it."""

import dataclasses

import jax
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampled:
    """What one step chose. Logprobs, ranks and alternatives are set in steps where some row asks for logprobs."""

    token: Int[Array, "R"]
    logprob: Float[Array, "R"]
    rank: Int[Array, "R"]
    top_ids: Int[Array, "R k"]
    top_logprobs: Float[Array, "R k"]
    flags: Int[Array, "R"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verified:
    """The first num_tokens entries of each row are its new tokens (accepted drafts, then one more); the others are -1.

    Inactive rows have none. The other fields are as in `Sampled`, one entry per position.
    """

    tokens: Int[Array, "S n"]
    num_tokens: Int[Array, "S"]
    logprob: Float[Array, "S n"]
    rank: Int[Array, "S n"]
    top_ids: Int[Array, "S n k"]
    top_logprobs: Float[Array, "S n k"]
    flags: Int[Array, "S n"]

"""What the sampler must know about each row of a batch, and its trip to the device as one array."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt

from trillion_infer.core.sampling_params import GREEDY_EPSILON

_INTS = ("slot", "active", "index", "top_k", "seed", "logprobs", "has_bias")
_FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
PACKED_FIELDS = len(_INTS) + 1 + len(_FLOATS)
"""Rows of the packed array: the seed takes two."""

INDEX_FIELD = _INTS.index("index")
"""Row of the packed array that holds the number of the token being chosen."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowParams:
    """Sampling parameters of R rows, filled by the host each step (numpy) and read by the step (JAX).

    slot: row of SamplerState; active: False for padding and for prompts that are not finished, whose results
    mean nothing and which change no state; index: number of the token being chosen within its request, which
    with `seed` names its random numbers; logprobs: alternatives wanted, -1 for none; has_bias: the slot's
    bias counts. The rest is SamplingParams'; top_k 0 is off.
    """

    slot: Int[Array, "R"]
    active: Bool[Array, "R"]
    index: Int[Array, "R"]
    top_k: Int[Array, "R"]
    seed: UInt[Array, "R 2"]
    logprobs: Int[Array, "R"]
    has_bias: Bool[Array, "R"]
    temperature: Float[Array, "R"]
    top_p: Float[Array, "R"]
    min_p: Float[Array, "R"]
    repetition: Float[Array, "R"]
    presence: Float[Array, "R"]
    frequency: Float[Array, "R"]

    @classmethod
    def padding(cls, num_rows: int) -> Self:
        """Rows that are inactive and ask for nothing (numpy, writable)."""
        ints = {name: np.zeros(num_rows, np.int32) for name in ("slot", "index", "top_k")}
        flags = {name: np.zeros(num_rows, bool) for name in ("active", "has_bias")}
        zeros = {name: np.zeros(num_rows, np.float32) for name in ("temperature", "min_p", "presence", "frequency")}
        ones = {name: np.ones(num_rows, np.float32) for name in ("top_p", "repetition")}
        seed = np.zeros((num_rows, 2), np.uint32)
        return cls(**ints, **flags, **zeros, **ones, seed=seed, logprobs=np.full(num_rows, -1, np.int32))  # pyright: ignore

    @property
    def greedy(self) -> Bool[Array, "R"]:
        """Rows that take the likeliest token and use no randomness."""
        return (self.temperature < GREEDY_EPSILON) | (self.top_k == 1)

    @property
    def penalised(self) -> Bool[Array, "R"]:
        return (self.repetition != 1.0) | (self.presence != 0.0) | (self.frequency != 0.0)


def pack(rows: RowParams) -> Int[np.ndarray, "F R"]:
    """One int32 array for one transfer; floats travel by their bits. Inverse of `unpack`."""
    columns = []
    for name in _INTS:
        value = np.asarray(getattr(rows, name))
        columns += [value[:, 0], value[:, 1]] if name == "seed" else [value]
    ints = np.stack([_as_int32(column) for column in columns])
    floats = np.stack([np.asarray(getattr(rows, name), np.float32) for name in _FLOATS])
    return np.concatenate([ints, floats.view(np.int32)])


def unpack(packed: Int[Array, "F R"]) -> RowParams:
    """The rows of a packed array, inside the jitted step."""
    fields: dict[str, Shaped[Array, ...]] = {}
    at = 0
    for name in _INTS:
        if name == "seed":
            fields[name] = jax.lax.bitcast_convert_type(packed[at : at + 2], jnp.uint32).T
            at += 2
            continue
        fields[name] = packed[at] != 0 if name in ("active", "has_bias") else packed[at]
        at += 1
    for name in _FLOATS:
        fields[name] = jax.lax.bitcast_convert_type(packed[at], jnp.float32)
        at += 1
    return RowParams(**fields)


def _as_int32(column: np.ndarray) -> np.ndarray:
    return column.view(np.int32) if column.dtype == np.uint32 else column.astype(np.int32)

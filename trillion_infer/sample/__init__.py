"""Sampling on the device: `sample` inside the step, `score` for prompts, and the host's side in `host`."""

from typing import TYPE_CHECKING

from pallas_kernels.common.lazy import names_on_use
from trillion_infer.sample.chosen import Sampled, Verified
from trillion_infer.sample.rows import PACKED_FIELDS, RowParams, pack, unpack
from trillion_infer.sample.state import SLOT_CHUNK, SamplerState, init_slot

if TYPE_CHECKING:
    from trillion_infer.sample.logprobs import LOGPROB_FLOOR, score
    from trillion_infer.sample.sampler import MASK_EMPTY, NOT_FINITE, sample

__all__ = [
    "LOGPROB_FLOOR",
    "MASK_EMPTY",
    "NOT_FINITE",
    "PACKED_FIELDS",
    "SLOT_CHUNK",
    "RowParams",
    "Sampled",
    "SamplerState",
    "Verified",
    "init_slot",
    "pack",
    "sample",
    "score",
    "unpack",
]

__getattr__ = names_on_use(
    __name__,
    {
        "LOGPROB_FLOOR": "logprobs",
        "score": "logprobs",
        "MASK_EMPTY": "sampler",
        "NOT_FINITE": "sampler",
        "sample": "sampler",
    },
)

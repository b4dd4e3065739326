"""Sampling on the device: `sample` inside the step, `score` for prompts, and the host's side in `host`."""

from trillion_infer.sample.logprobs import LOGPROB_FLOOR, score
from trillion_infer.sample.rows import PACKED_FIELDS, RowParams, pack, unpack
from trillion_infer.sample.sampler import MASK_EMPTY, NOT_FINITE, Sampled, sample
from trillion_infer.sample.state import SLOT_CHUNK, SamplerState, init_slot

__all__ = [
    "LOGPROB_FLOOR",
    "MASK_EMPTY",
    "NOT_FINITE",
    "PACKED_FIELDS",
    "SLOT_CHUNK",
    "RowParams",
    "Sampled",
    "SamplerState",
    "init_slot",
    "pack",
    "sample",
    "score",
    "unpack",
]

"""Speculative decoding: drafters propose, `verify.verify` decides, `adaptive` chooses how many drafts pay.

This package's own names need no JAX; the verifier is imported from its module.
"""

from trillion_infer.speculate.adaptive import Acceptance, StepCost, allot
from trillion_infer.speculate.base import Draft, Drafter, DraftRequest
from trillion_infer.speculate.registry import DrafterSpec, host_drafters, parse_speculate
from trillion_infer.speculate.speculator import Speculator

__all__ = [
    "Acceptance",
    "Draft",
    "DraftRequest",
    "Drafter",
    "DrafterSpec",
    "Speculator",
    "StepCost",
    "allot",
    "host_drafters",
    "parse_speculate",
]

"""How many tokens may be drafted at a time."""

from trillion_infer.config.engine import EngineConfig

MAX_DRAFTS = 15
"""Drafts of one request in one step: with the token before them, the positions of a verification row."""

MODEL_DRAFTS = 3
"""The same where a model drafts: each further draft costs a run of it."""


def draft_length(config: EngineConfig) -> int:
    """Drafts of one request in one step, at most; 0 without speculation. Raises ConfigError for unknown drafters."""
    if not config.speculate:
        return 0
    from trillion_infer.speculate import parse_speculate

    specs = parse_speculate(config.speculate)
    if not specs:
        return 0
    return config.draft_len or (MAX_DRAFTS if all(spec.on_host for spec in specs) else MODEL_DRAFTS)

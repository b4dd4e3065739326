"""What a drafter gives on prompts that it was not trained on."""

from collections.abc import Mapping, Sequence
from typing import Any

from trillion_infer.core.sampling_params import SamplingParams
from trillion_infer.engine.engine import Engine
from trillion_infer.llm import LLM
from trillion_infer.train.answers import prompt_of

PREFILL_CHUNK = 512
"""Tokens of prompts a step, at least, while a drafter is measured."""


def acceptance(
    options: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], speculate: str, length: int, max_tokens: int
) -> dict[str, float]:
    """Greedy answers with `length` drafts at every step: stats of the drafter, as LLM.stats() names them.

    acceptance_length is the mean number of tokens that a step of a request gave, the target's own included. Steps that
    prefill verify nothing, so chunks are large whatever the options say: few answers lack their beginning.
    """
    chunk = max(PREFILL_CHUNK, options.get("prefill_chunk", 0))
    llm = LLM(**{**options, "speculate": speculate, "draft_len": length, "prefill_chunk": chunk})
    try:
        llm.wait_for_programs()
        assert isinstance(llm.engine, Engine)
        assert llm.engine.speculation is not None
        llm.engine.speculation.draft_always()
        llm.generate([prompt_of(llm, row) for row in rows], SamplingParams(temperature=0, max_tokens=max_tokens))
        return {name: value for name, value in llm.stats().items() if name.startswith("speculate.")}
    finally:
        llm.close()

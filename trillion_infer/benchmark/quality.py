"""What rounding costs: perplexity of a text, and how far predictions move from those of a reference."""

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from trillion_infer.core.errors import ConfigError, InvalidRequestError
from trillion_infer.core.outputs import Logprob
from trillion_infer.core.sampling_params import SamplingParams
from trillion_infer.llm import LLM

WINDOW = 512
"""Tokens scored together; the first of a window is given, not scored."""
ALTERNATIVES = 20

Scores = Sequence[tuple[int, Mapping[int, Logprob]]]
"""For each scored position the token that stands there, and log-probabilities of it and of the likeliest tokens."""


@dataclass(frozen=True)
class Quality:
    """One variant beside the reference.

    kl: mean of KL(reference || variant) in nats a token over the reference's 20 likeliest tokens that both list and the
    rest taken as one, hence at most the whole KL. agreement: share of positions with the same likeliest token.
    """

    variant: str
    tokens: int
    perplexity: float
    ratio: float
    kl: float
    agreement: float
    weights_mb: float


def shipped_text() -> str:
    """Prose (in the public domain, and written for this), and a little code; about 930 tokens of SmolLM2."""
    return resources.files("trillion_infer.benchmark").joinpath("quality_text.txt").read_text(encoding="utf-8")


def parse_variants(text: str) -> list[dict[str, str | int]]:
    """ "dtype=bfloat16;quantize=int8,kv_dtype=int8" to keywords of LLM by variant. Raises ConfigError."""
    variants = []
    for variant in filter(None, text.split(";")):
        pairs = [part.partition("=") for part in variant.split(",")]
        if not all(name and mark and value for name, mark, value in pairs):
            raise ConfigError(f"variant {variant!r} is not a list like dtype=bfloat16,quantize=int8.")
        variants.append({name.strip(): int(value) if value.isdigit() else value.strip() for name, _, value in pairs})
    return variants


def score(llm: LLM, ids: Sequence[int]) -> Scores:
    """Scores every token of a text but the first of each window."""
    size = min(WINDOW, llm.max_model_len - 1)
    windows = [list(ids[start : start + size]) for start in range(0, len(ids), size)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=ALTERNATIVES)
    outputs = llm.generate([{"prompt_token_ids": window} for window in windows], params)
    return [
        (token, entry)
        for window, output in zip(windows, outputs, strict=True)
        for token, entry in zip(window[1:], (output.prompt_logprobs or [])[1:], strict=True)
        if entry is not None
    ]


def compare(name: str, weights: int, reference: Scores, found: Scores) -> Quality:
    """The figures of one variant."""
    count = len(found)
    loss, base = (-sum(entry[token].logprob for token, entry in scores) / count for scores in (found, reference))
    pairs = [(ours, theirs) for (_, ours), (_, theirs) in zip(found, reference, strict=True)]
    return Quality(
        name,
        count,
        math.exp(loss),
        math.exp(loss - base),
        sum(_divergence(theirs, ours) for ours, theirs in pairs) / count,
        sum(_best(ours) == _best(theirs) for ours, theirs in pairs) / count,
        weights / 1e6,
    )


def run_variants(
    options: Mapping[str, Any], variants: Sequence[Mapping[str, Any]], text: str, make: Callable[..., LLM] = LLM
) -> Iterator[Quality]:
    """The reference (`options` as they are), then each variant of them, one engine at a time."""
    reference: Scores = []
    for variant in ({}, *variants):
        llm = make(**{**options, **variant})
        try:
            if llm.tokenizer is None:
                raise InvalidRequestError("quality is measured on a text, and the model has no tokenizer.")
            found = score(llm, llm.tokenizer.encode(text))
            reference = reference or found
            name = ",".join(f"{key}={value}" for key, value in variant.items()) or "reference"
            yield compare(name, llm.memory()["weights"], reference, found)
        finally:
            llm.close()
            del llm
            gc.collect()


def _best(entry: Mapping[int, Logprob]) -> int:
    return min(entry, key=lambda token: entry[token].rank or 0)


def _divergence(reference: Mapping[int, Logprob], found: Mapping[int, Logprob]) -> float:
    both = [(math.exp(reference[t].logprob), math.exp(found[t].logprob)) for t in reference if t in found]
    rest = [max(1e-12, 1 - sum(side)) for side in zip(*both, strict=True)] if both else [1.0, 1.0]
    return sum(p * math.log(p / q) for p, q in (*both, rest) if p > 0 and q > 0)

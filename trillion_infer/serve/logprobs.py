"""Logprobs as OpenAI's two endpoints write them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from trillion_infer.core.outputs import Logprob
from trillion_infer.text.tokenizer import Tokenizer

FLOOR = -9999.0
"""Stands for a probability of nothing, since JSON has no infinity."""

Entry = Mapping[int, Logprob]


def finite(value: float) -> float:
    return value if math.isfinite(value) else FLOOR


def likeliest(entry: Entry, count: int) -> list[tuple[int, Logprob]]:
    """The `count` likeliest of an entry, the likeliest first."""
    return sorted(entry.items(), key=lambda item: item[1].rank)[:count]


def completion_logprobs(
    ids: Sequence[int], entries: Sequence[Entry | None], count: int, offset: int = 0
) -> dict[str, Any]:
    """Of /v1/completions: parallel lists. `offset`: characters of text before the first token."""
    tokens, values, tops, offsets = [], [], [], []
    for token, entry in zip(ids, entries, strict=True):
        text = entry[token].decoded_token if entry else ""
        tokens.append(text)
        values.append(finite(entry[token].logprob) if entry else None)
        tops.append({f.decoded_token: finite(f.logprob) for _, f in likeliest(entry, count)} if entry else None)
        offsets.append(offset)
        offset += len(text)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def chat_logprobs(
    ids: Sequence[int], entries: Sequence[Entry], count: int, tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """Of /v1/chat/completions: one object a token."""

    def named(token: int, found: Logprob) -> dict[str, Any]:
        return {
            "token": found.decoded_token,
            "logprob": finite(found.logprob),
            "bytes": list(tokenizer.id_to_bytes(token)),
        }

    return [
        {**named(token, entry[token]), "top_logprobs": [named(*each) for each in likeliest(entry, count)]}
        for token, entry in zip(ids, entries, strict=True)
    ]

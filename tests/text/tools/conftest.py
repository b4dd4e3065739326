"""A byte-level tokenizer that holds every marker of every format as a token of its own."""

import numpy as np
import pytest

from trillion_infer.text import Tokenizer
from trillion_infer.text.pieces import _ALPHABET
from trillion_infer.text.tools import REASONING_FORMATS, TOOL_FORMATS


@pytest.fixture(scope="session")
def marker_tokenizer() -> Tokenizer:
    letters = [char for char, _ in sorted(_ALPHABET.items(), key=lambda item: item[1])]
    markers = [mark for reasoning in REASONING_FORMATS.values() for mark in (reasoning.open, reasoning.close)]
    for calls in TOOL_FORMATS.values():
        markers += [m for m in calls.markers if m.startswith("<") and m.endswith(">")]
    tokens = [*letters, *dict.fromkeys(markers), "<|eos|>"]
    types = [1] * 256 + [4] * (len(tokens) - 257) + [3]
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.token_type": np.array(types, np.int32),
            "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        }
    )

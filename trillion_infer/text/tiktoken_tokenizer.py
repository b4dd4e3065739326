"""Reads a tiktoken.model file (Kimi): bytes in base64 with their rank, one a line."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from trillion_infer.core.errors import ModelLoadError
from trillion_infer.text.pieces import byte_level_piece
from trillion_infer.text.pretokenizers import KIMI_K2

_PATTERNS = {"TikTokenTokenizer": KIMI_K2}
_SPECIAL_TOKENS = 256


def backend_from_tiktoken(path: Path, config: dict[str, Any]) -> Backend:
    """The tokenizer of `path`. `config` is tokenizer_config.json: its class tells how text is split, its
    added_tokens_decoder what the 256 ids behind the ranks are called."""
    kind = config.get("tokenizer_class")
    if kind not in _PATTERNS:
        raise ModelLoadError(
            f"{path} is of the class {kind!r}, whose splitting is not known ({', '.join(_PATTERNS)} is); "
            "write a tokenizer.json with transformers and put it beside."
        )
    pieces = _read_pieces(path)
    vocab = {piece: rank for rank, piece in enumerate(pieces)}
    declared = {int(id): token["content"] for id, token in config.get("added_tokens_decoder", {}).items()}
    special_ids = range(len(vocab), len(vocab) + _SPECIAL_TOKENS)
    specials = {id: declared.get(id, f"<|reserved_token_{id}|>") for id in special_ids}
    backend = Backend(models.BPE(vocab | {text: id for id, text in specials.items()}, _merges(pieces, vocab)))
    split = pre_tokenizers.Split(Regex(_PATTERNS[kind]), behavior="isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    reserved = [text for id, text in specials.items() if id not in declared]
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in reserved])
    return backend


def _read_pieces(path: Path) -> list[str]:
    """Byte-level spellings in the order of their ranks, which are 0, 1, 2, …"""
    pieces = []
    for number, line in enumerate(path.read_bytes().splitlines()):
        try:
            text, rank_text = line.split()
            piece, rank = byte_level_piece(base64.b64decode(text, validate=True)), int(rank_text)
        except (ValueError, binascii.Error) as error:
            raise ModelLoadError(f"line {number + 1} of {path} is not 'base64 rank': {error}.") from error
        if rank != number:
            raise ModelLoadError(f"line {number + 1} of {path} has rank {rank}; ranks must count up from 0.")
        pieces.append(piece)
    return pieces


def _merges(pieces: list[str], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """tiktoken merges the neighbours whose union has the lowest rank, so every split of a piece is a merge."""
    return [
        (left, right)
        for piece in pieces
        for cut in range(1, len(piece))
        if (left := piece[:cut]) in vocab and (right := piece[cut:]) in vocab
    ]

"""Text in and text out: tokenizer, incremental detokeniser, chat template, stop strings."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trillion_infer.text.chat import ChatTemplate, encode_chat, render_chat
    from trillion_infer.text.detokenizer import IncrementalDetokenizer
    from trillion_infer.text.stop import StopMatcher
    from trillion_infer.text.tokenizer import Tokenizer

_EXPORTS = {
    "ChatTemplate": "chat",
    "IncrementalDetokenizer": "detokenizer",
    "StopMatcher": "stop",
    "Tokenizer": "tokenizer",
    "encode_chat": "chat",
    "render_chat": "chat",
}

__all__ = ["ChatTemplate", "IncrementalDetokenizer", "StopMatcher", "Tokenizer", "encode_chat", "render_chat"]


def __getattr__(name: str) -> Any:
    """Imports on first use: who decodes text does not wait for Jinja."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'trillion_infer.text' has no attribute {name!r}")
    return getattr(importlib.import_module(f"trillion_infer.text.{_EXPORTS[name]}"), name)

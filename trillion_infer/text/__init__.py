"""Text in and text out: tokenizer, incremental detokeniser, chat template, stop strings."""

from trillion_infer.text.chat import ChatTemplate, encode_chat, render_chat
from trillion_infer.text.detokenizer import IncrementalDetokenizer
from trillion_infer.text.stop import StopMatcher
from trillion_infer.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "IncrementalDetokenizer", "StopMatcher", "Tokenizer", "encode_chat", "render_chat"]

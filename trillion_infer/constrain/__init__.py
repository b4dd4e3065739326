"""Grammars that a request's tokens must follow."""

from trillion_infer.constrain.compiler import GrammarCompiler, compile_grammar, schema_rule
from trillion_infer.constrain.envelope import Reasoning, message_grammar
from trillion_infer.constrain.relax import relax_schema
from trillion_infer.constrain.state import GrammarState

__all__ = [
    "GrammarCompiler",
    "GrammarState",
    "Reasoning",
    "compile_grammar",
    "message_grammar",
    "relax_schema",
    "schema_rule",
]

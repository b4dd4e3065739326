"""Grammars that a request's tokens must follow."""

from trillion_infer.constrain.compiler import GrammarCompiler, compile_grammar, schema_rule
from trillion_infer.constrain.state import GrammarState

__all__ = ["GrammarCompiler", "GrammarState", "compile_grammar", "schema_rule"]

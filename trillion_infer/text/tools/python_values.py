"""Python literals as JSON values."""

from __future__ import annotations

import ast
import json
import warnings
from typing import Any

NOTHING = object()
_WORDS = {"true": True, "false": False, "null": None}


def dump(value: Any) -> str:
    """`value` as JSON text that can be sent as UTF-8."""
    text = json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if any("\ud800" <= char <= "\udfff" for char in text) else text


def python_value(source: str) -> Any:
    """The JSON value of a Python literal, NOTHING if it is none."""
    values = keyword_arguments(f"v={source}", ())
    return NOTHING if values is None or set(values) != {"v"} else values["v"]


def keyword_arguments(source: str, parameters: tuple[str, ...]) -> dict[str, Any] | None:
    """Arguments of `f(source)` as JSON values, positional ones named by `parameters`; None if they are no
    literals."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            call = ast.parse(f"f({source.strip()})", mode="eval").body
        if not isinstance(call, ast.Call) or len(call.args) > len(parameters):
            return None
        pairs = [*zip(parameters, call.args, strict=False), *((k.arg, k.value) for k in call.keywords)]
        values = {name: ast.literal_eval(_JsonWords().visit(node)) for name, node in pairs if name is not None}
        json.dumps(values, allow_nan=False)
        return values if len(values) == len(pairs) else None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


class _JsonWords(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_WORDS[node.id]) if node.id in _WORDS else node

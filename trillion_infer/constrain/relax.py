"""A schema reduced to what can be enforced.

Tools come with schemas of every kind, and one odd keyword must not make a tool unusable. What cannot be enforced
is dropped, so that everything the schema allows stays allowed; the rest is enforced.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trillion_infer.constrain.schema import ENFORCED, FORMATS, SCHEMA_LISTS, SCHEMA_MAPS, SCHEMAS

_TYPES = frozenset(("object", "array", "string", "number", "integer", "boolean", "null"))
# Look-around and back-references, which no automaton follows.
_BEYOND_REGULAR = re.compile(r"\(\?(?:[=!]|<[=!])|\\[1-9]|\\k<")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")


def relax_schema(schema: Any) -> Any:
    """A schema of enforced keywords only, that allows at least what `schema` allows."""
    return _Relaxer(schema).relax(schema)


class _Relaxer:
    def __init__(self, root: Any):
        self._root = root

    def relax(self, schema: Any) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            return {}
        schema = dict(schema)
        if "anyOf" not in schema and "oneOf" in schema:
            schema["anyOf"] = schema["oneOf"]
        if isinstance(schema.get("items"), list) and "prefixItems" not in schema:
            schema["prefixItems"] = schema.pop("items")
        keep = {*(ENFORCED - {"oneOf"}), "$defs", "definitions"}
        usable = {key: value for key, value in schema.items() if key in keep and self._usable(key, value)}
        return {key: self._value(key, value) for key, value in usable.items()}

    def _value(self, key: str, value: Any) -> Any:
        if key in SCHEMA_MAPS:
            return {name: self.relax(inner) for name, inner in value.items()}
        if key in SCHEMA_LISTS:
            return [self.relax(inner) for inner in value]
        return self.relax(value) if key in SCHEMAS else value

    def _usable(self, key: str, value: Any) -> bool:
        if key == "type":
            return _names(value if isinstance(value, list) else [value], _TYPES) and value != []
        if key == "format":
            return _names([value], FORMATS)
        if key == "pattern":
            return _is_regular(value)
        if key == "patternProperties":
            return isinstance(value, Mapping) and all(map(_is_regular, value))
        if key in SCHEMA_MAPS:
            return isinstance(value, Mapping)
        if key in (*SCHEMA_LISTS, "enum"):
            return isinstance(value, list) and bool(value)
        if key in _NUMBERS or key in _COUNTS:
            is_number = isinstance(value, (int, float) if key in _NUMBERS else int) and not isinstance(value, bool)
            return is_number and (value > 0 or key != "multipleOf") and (value >= 0 or key not in _COUNTS)
        if key == "required":
            return isinstance(value, list) and _names(value, None)
        return self._resolves(value) if key == "$ref" else True

    def _resolves(self, reference: Any) -> bool:
        if not isinstance(reference, str) or not reference.startswith("#"):
            return False
        at = self._root
        for step in filter(None, reference[1:].split("/")):
            step = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(at, Mapping) or step not in at:
                return False
            at = at[step]
        return True


def _names(values: list, allowed: frozenset[str] | None) -> bool:
    """Whether these are strings, each once, of those `allowed`."""
    strings = all(isinstance(value, str) for value in values)
    return strings and len(set(values)) == len(values) and (allowed is None or allowed.issuperset(values))


def _is_regular(pattern: Any) -> bool:
    if not isinstance(pattern, str) or _BEYOND_REGULAR.search(pattern):
        return False
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True

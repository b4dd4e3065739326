"""Which JSON schemas can be enforced. Whatever cannot is refused with a JSON pointer, never ignored."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from trillion_infer.core.errors import InvalidRequestError

ENFORCED = frozenset(
    "type enum const anyOf oneOf allOf $ref properties required additionalProperties patternProperties minProperties "
    "maxProperties items prefixItems minItems maxItems minLength maxLength pattern format minimum maximum "
    "exclusiveMinimum exclusiveMaximum multipleOf".split()
)
_ANNOTATIONS = frozenset(
    "$schema $id $anchor $comment $defs definitions title description default examples example deprecated readOnly "
    "writeOnly contentEncoding contentMediaType discriminator strict".split()
)
FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uri uuid".split())
# Whatever else these say, uniqueItems false and nullable false restrict nothing.
_VACUOUS = (("uniqueItems", False), ("nullable", False))
SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SCHEMAS = ("additionalProperties", "items")


def parse_schema(schema: Mapping[str, Any] | str | bool) -> dict[str, Any]:
    """The schema as Python values, every keyword checked and vacuous ones removed."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except json.JSONDecodeError as error:
            raise InvalidRequestError(f"json_schema is not valid JSON: {error}.", param="json_schema") from error
    checked = _checked(schema, "#")
    if checked is False:
        raise refuse("#", "the schema false allows no value at all.")
    return {} if checked is True else checked


def subschemas(schema: Any, pointer: str = "#") -> Iterator[tuple[str, Any]]:
    """(pointer, schema) of `schema` and all schemas inside it, the inner ones first."""
    if isinstance(schema, Mapping):
        for key, inner in _children(schema):
            yield from subschemas(inner, f"{pointer}/{key}")
    yield pointer, schema


def refuse(pointer: str, why: str) -> InvalidRequestError:
    """The error for the part of a schema at `pointer`."""
    return InvalidRequestError(f"json_schema at {pointer}: {why}", param="json_schema")


def _checked(schema: Any, pointer: str) -> Any:
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping):
        raise refuse(pointer, f"a schema is expected (an object, true or false), got {schema!r:.80}.")
    kept = {key: value for key, value in schema.items() if (key, value) not in _VACUOUS}
    for key in kept:
        if key not in ENFORCED and key not in _ANNOTATIONS and not (key.startswith("x-") and key != "x-guidance"):
            raise refuse(
                f"{pointer}/{escape(key)}",
                f"the keyword {key!r} cannot be enforced; remove it or express it by one of "
                f"{', '.join(sorted(ENFORCED))}.",
            )
    if isinstance(kept.get("items"), list):
        raise refuse(f"{pointer}/items", "a list of schemas is written as 'prefixItems' since draft 2020-12.")
    if "format" in kept and kept["format"] not in FORMATS:
        raise refuse(
            f"{pointer}/format",
            f"the format {kept['format']!r} cannot be enforced; use one of {', '.join(sorted(FORMATS))}.",
        )
    for key in SCHEMA_MAPS:
        if key in kept:
            kept[key] = {name: _checked(s, f"{pointer}/{key}/{escape(name)}") for name, s in _map(kept, key, pointer)}
    for key in SCHEMA_LISTS:
        if key in kept:
            if not isinstance(kept[key], list):
                raise refuse(f"{pointer}/{key}", "a list of schemas is expected.")
            kept[key] = [_checked(s, f"{pointer}/{key}/{n}") for n, s in enumerate(kept[key])]
    for key in SCHEMAS:
        if key in kept:
            kept[key] = _checked(kept[key], f"{pointer}/{key}")
    return kept


def _map(schema: Mapping[str, Any], key: str, pointer: str) -> Any:
    if not isinstance(schema[key], Mapping):
        raise refuse(f"{pointer}/{key}", "an object of schemas is expected.")
    return schema[key].items()


def _children(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in SCHEMA_MAPS:
        for name, inner in schema.get(key, {}).items():
            yield f"{key}/{escape(name)}", inner
    for key in SCHEMA_LISTS:
        for number, inner in enumerate(schema.get(key, ())):
            yield f"{key}/{number}", inner
    for key in SCHEMAS:
        if key in schema:
            yield key, schema[key]


def escape(name: str) -> str:
    """`name` as one step of a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")

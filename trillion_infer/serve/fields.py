"""Reads the fields of a JSON body: types checked, unknown names refused."""

import json
from collections.abc import Collection, Mapping
from typing import Any

from trillion_infer.serve.errors import ApiError

IGNORED = frozenset(
    "user store metadata service_tier safety_identifier prompt_cache_key prompt_cache_retention verbosity "
    "modalities prediction audio".split()
)
"""Fields that OpenAI's clients send and that change nothing here."""

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))

_NAMES = {str: "a string", int: "a whole number", float: "a number", bool: "true or false", list: "a list"}
_NAMES[dict] = "an object"


class Fields:
    """A JSON object whose fields are taken with their types; `where` names it in errors."""

    def __init__(self, data: Any, known: Collection[str], where: str = ""):
        if not isinstance(data, Mapping):
            raise ApiError(
                400, f"{where or 'the body'} is {_kind(data)}; it must be a JSON object.", param=where or None
            )
        self._data, self._where = data, where
        unknown = sorted(set(data) - set(known) - (IGNORED if not where else frozenset()))
        if unknown:
            name = self._path(unknown[0])
            raise ApiError(
                400, f"{name} is not a field of this endpoint; leave it out.", param=name, code="unknown_field"
            )

    def take(self, name: str, *kinds: type, default: Any = None) -> Any:
        """The field's value; `default` where it is missing or null. Raises ApiError for other types."""
        value = self._data.get(name)
        if value is None:
            return default
        numeric = float in kinds and isinstance(value, int)
        if (isinstance(value, bool) and bool not in kinds) or not (isinstance(value, kinds) or numeric):
            allowed = " or ".join(_NAMES[kind] for kind in kinds)
            raise ApiError(400, f"{self._path(name)} is {_kind(value)}; it must be {allowed}.", param=self._path(name))
        return value

    def need(self, name: str, *kinds: type) -> Any:
        """`take` of a field that must be there."""
        value = self.take(name, *kinds)
        if value is None:
            raise ApiError(400, f"{self._path(name)} is missing; give it.", param=self._path(name))
        return value

    def given(self, *names: str) -> dict[str, Any]:
        """The fields among `names` that are there and not null, unchecked."""
        return {name: self._data[name] for name in names if self._data.get(name) is not None}

    def _path(self, name: str) -> str:
        return f"{self._where}.{name}" if self._where else name


def parse_json(body: bytes) -> Any:
    """The JSON value of a body. Raises ApiError that says where it is broken."""
    try:
        return json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}.", code="invalid_json") from error


def dump_json(value: Any) -> bytes:
    """Compact JSON in UTF-8, never with NaN or infinity in it."""
    return _ENCODER.encode(value).encode("utf-8", "backslashreplace")


class JsonTemplate:
    """A JSON value with one text that changes: all around it is written once. `value` holds HOLE in its place."""

    HOLE = "\0"

    def __init__(self, value: Any):
        self._before, self._after = dump_json(value).split(dump_json(self.HOLE))

    def fill(self, text: str) -> bytes:
        """The JSON with `text` in its place."""
        return b"%b%b%b" % (self._before, dump_json(text), self._after)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _kind(value: Any) -> str:
    return "null" if value is None else _NAMES.get(type(value), type(value).__name__)

"""Calls written as markup, one element a parameter (Qwen3-Coder, MiniMax, DeepSeek V3.2, GLM)."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from trillion_infer.text.tools.context import Context
from trillion_infer.text.tools.python_values import NOTHING, dump, python_value
from trillion_infer.text.tools.scanner import Reader, Scanner, Sink, discard

_STRING_FLAG = re.compile(r'string="(true|false)"')


@dataclass(frozen=True)
class MarkupCalls:
    """`begin (call_open NAME call_close (param_open KEY param_close VALUE param_end)* call_end)* end`.

    An empty `call_open` puts the name right behind `begin`, and `call_end` is then `end`. `trims_newline` drops one
    line break at either end of a value; `flagged` reads `string="true|false"` behind the key. A value's type comes
    from that flag, else from the tool's schema, else from what the value looks like.
    """

    begin: str
    end: str
    call_open: str
    call_close: str
    call_end: str
    param_open: str
    param_close: str
    param_end: str
    trims_newline: bool = False
    flagged: bool = False
    key_end: str = ""
    interrupts_reasoning: bool = False

    @property
    def openers(self) -> tuple[str, ...]:
        return (self.begin,)

    @property
    def markers(self) -> tuple[str, ...]:
        call = (self.begin, self.end, self.call_open, self.call_end)
        parameter = (self.param_open, self.key_end, self.param_close, self.param_end)
        return tuple(part for part in call + parameter if len(part) > 2)

    def start(self, context: Context) -> Reader:
        yield from ()

    def read(self, context: Context, opener: str) -> Reader:
        if not self.call_open:
            yield from self._call(context)
            return
        scan, emit = context.scan, context.emit
        going = True
        while going:
            marker = yield from scan.until((self.call_open, self.end), emit.content)
            going = marker == self.call_open and (yield from self._call(context))

    def _call(self, context: Context) -> Generator[None, None, bool]:
        """One call; whether another may follow before `end`."""
        scan, emit = context.scan, context.emit
        name, marker = yield from self._name(context)
        if name is None:
            return marker not in (self.end, None)
        emit.start_call(name)
        seen: set[str] = set()
        complete = True
        while marker == self.param_open:
            complete = yield from _Parameter(self, context, name, seen).read()
            if not complete:
                marker = None
                break
            marker = yield from scan.until((self.param_open, self.call_end, self.end), discard)
        emit.arguments("}" if seen else "{}")
        emit.end_call(complete and marker is not None)
        return marker == self.call_end != self.end

    def _name(self, context: Context) -> Generator[None, None, tuple[str | None, str | None]]:
        """(name, marker behind it: the first `param_open`, an end, or None at the end of the text)."""
        scan, parts = context.scan, []
        ends = (self.param_open, self.call_end, self.end)
        marker = yield from scan.until((self.call_close, *ends) if self.call_close else ends, parts.append)
        name = scan.drop_markers("".join(parts)).strip().strip("\"'")
        if not context.is_name(name) or marker is None:
            context.emit.content("".join(parts))
            return None, marker
        if self.call_close and marker == self.call_close:
            marker = yield from scan.until(ends, discard)
        return name, marker


class _Parameter:
    """Reads one parameter, from behind `param_open` to behind `param_end`, and tells its JSON."""

    def __init__(self, format: MarkupCalls, context: Context, tool: str, seen: set[str]):
        self._format = format
        self._context = context
        self._tool = tool
        self._seen = seen  # keys told so far; this one is added

    def read(self) -> Generator[None, None, bool]:
        """False if the parameter was cut off; a string told so far is closed then."""
        scan, head = self._context.scan, []
        found = yield from scan.until((self._format.param_close,), head.append)
        key, flag = self._key("".join(head))
        if found is None:
            return False
        skip = key in self._seen
        schema = self._context.parameter_schema(self._tool, key)
        is_text = flag == "true" or (flag is None and schema is not None and _only_text(schema))
        parts: list[str] = []
        if is_text and not skip:
            self._tell_key(key)
            self._context.emit.arguments('"')
        sink = self._tell_text if is_text and not skip else parts.append
        whole = yield from self._value(sink)
        if is_text and not skip:
            self._context.emit.arguments('"')
        elif whole and not skip:
            self._tell_key(key)
            text = self._context.scan.spell_markers("".join(parts))
            self._context.emit.arguments(_to_json(text, schema, flag))
        return whole

    def _key(self, head: str) -> tuple[str, str | None]:
        if self._format.key_end:
            head = head.partition(self._context.scan.resolve(self._format.key_end))[0]
        if not self._format.flagged:
            return self._context.scan.drop_markers(head).strip().strip("\"'"), None
        key, _, rest = head.partition('"')
        flag = _STRING_FLAG.search(rest)
        return key.strip(), flag[1] if flag else None

    def _tell_key(self, key: str) -> None:
        lead = ", " if self._seen else "{"
        self._seen.add(key)
        self._context.emit.arguments(f"{lead}{json.dumps(key, ensure_ascii=False)}: ")

    def _tell_text(self, text: str) -> None:
        plain = self._context.scan.spell_markers(text)
        self._context.emit.arguments(json.dumps(plain, ensure_ascii=False)[1:-1])

    def _value(self, sink: Sink) -> Generator[None, None, bool]:
        """The value's text without its framing line breaks."""
        scan, format = self._context.scan, self._format
        trimmer = _Newlines(sink) if format.trims_newline else None
        out = trimmer.push if trimmer else sink
        found = yield from scan.until((format.param_end, *self._broken_ends(scan)), out)
        if trimmer:
            trimmer.finish()
        return found == format.param_end

    def _broken_ends(self, scan: Scanner) -> tuple[str, ...]:
        """What ends a value whose own end is missing: the two ends behind it, together."""
        call, all_calls = self._format.call_end, self._format.end
        if call != all_calls:
            return (f"{call}\n{all_calls}", call + all_calls)
        return (all_calls,) if scan.is_token(all_calls) else ()


class _Newlines:
    """Passes text on without one line break at its start and one at its end."""

    def __init__(self, sink: Sink):
        self._sink = sink
        self._begun = False
        self._held = ""

    def push(self, text: str) -> None:
        if not self._begun and text:
            self._begun = True
            text = text.removeprefix("\n")
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        if shown := text.removesuffix("\n"):
            self._sink(shown)

    def finish(self) -> None:
        self._held = ""


def _types(schema: Any) -> set[str]:
    """Every JSON type `schema` names, through anyOf and oneOf."""
    kind = schema.get("type")
    found = set(kind) if isinstance(kind, list) else {kind} if isinstance(kind, str) else set()
    for key in ("anyOf", "oneOf"):
        for option in schema.get(key) or ():
            if isinstance(option, dict):
                found |= _types(option)
    if not found and "enum" in schema:
        found = {"string"} if all(isinstance(v, str) for v in schema["enum"]) else {"any"}
    return found


def _only_text(schema: Any) -> bool:
    return _types(schema) == {"string"}


def _to_json(text: str, schema: Any, flag: str | None) -> str:
    """`text` as JSON: parsed if it is JSON (or a Python literal) of a type the schema allows, else a string."""
    types = _types(schema) if schema is not None and flag is None else set()
    value = _parse(text.strip())
    if value is not NOTHING and not ("string" in types and value is not None):
        return dump(value)
    return dump(text)


def _parse(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        pass
    return python_value(text) if text[:1] in ("[", "{", "T", "F", "N") else NOTHING


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")

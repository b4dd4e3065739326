"""Copies JSON out of an arriving stream so that what was copied can be closed at any moment.

A comma, a key and a colon are copied together with the first character of their value, numbers and words when
they are whole, strings as they come. Python's words, raw line breaks in strings and trailing commas, which models
write, are mended on the way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator

from trillion_infer.text.tools.scanner import Scanner, Sink

_PLAIN = re.compile('[^"\\\\\x00-\x1f\ud800-\udfff]+')
_WORD = re.compile(r"[-+\w.]+")
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_CLOSERS = {"{": "}", "[": "]"}


class _Malformed(Exception):
    """The text is not JSON from here on."""


class JsonCopier:
    """Copies one value from `scanner` to `sink`. With `spell_markers`, marker tokens inside strings are text;
    otherwise they end the value."""

    def __init__(self, scanner: Scanner, sink: Sink, spell_markers: bool):
        self._scan = scanner
        self._write = sink
        self._spell = spell_markers
        self._open: list[str] = []
        self._held = ""  # read, but not copied before its value begins
        self._in_string = False
        self._just_opened = False

    def copy(self) -> Generator[None, None, bool]:
        """Copies the value; False if it was cut off or malformed (what was copied is closed then)."""
        try:
            yield from self._value()
            while self._open:
                yield from self._member()
        except _Malformed:
            if self._in_string:
                self._write('"')
            for opener in reversed(self._open):
                self._write(_CLOSERS[opener])
            return False
        return True

    def _flush(self, text: str) -> None:
        self._write(self._held + text)
        self._held = ""

    def _value(self) -> Generator[None, None, None]:
        self._held += yield from self._scan.space()
        char = yield from self._scan.peek()
        if char == '"':
            self._flush("")
            self._in_string = True
            yield from self._string(self._write)
            self._in_string = False
        elif char and char in _CLOSERS:
            yield from self._scan.take()
            self._flush(char)
            self._open.append(char)
            self._just_opened = True
        else:
            word = yield from self._scan.take_all(_WORD)
            if not (yield from self._scan.peek()) and self._open:
                raise _Malformed  # the end may have cut the word
            if word not in _WORDS and not _NUMBER.fullmatch(word):
                raise _Malformed
            self._flush(_WORDS.get(word, word))

    def _member(self) -> Generator[None, None, None]:
        """From behind a value (or an opening bracket) to behind the next value or the closing bracket."""
        first, self._just_opened = self._just_opened, False
        self._held += yield from self._scan.space()
        char = yield from self._scan.peek()
        if char == "," and not first:
            before = self._held
            self._held += yield from self._scan.take()
            self._held += yield from self._scan.space()
            char = yield from self._scan.peek()
            if char == _CLOSERS[self._open[-1]]:
                self._held = before
        elif not first and char != _CLOSERS[self._open[-1]]:
            raise _Malformed
        if char == _CLOSERS[self._open[-1]]:
            yield from self._scan.take()
            self._flush(char)
            self._open.pop()
            return
        if self._open[-1] == "{":
            yield from self._key()
        yield from self._value()

    def _key(self) -> Generator[None, None, None]:
        if (yield from self._scan.peek()) != '"':
            raise _Malformed
        parts: list[str] = []
        yield from self._string(parts.append)
        self._held += "".join(parts) + (yield from self._scan.space())
        if (yield from self._scan.peek()) != ":":
            raise _Malformed
        self._held += yield from self._scan.take()

    def _string(self, write: Sink) -> Generator[None, None, None]:
        write((yield from self._scan.take()))
        while True:
            char = yield from self._scan.peek()
            if not char or ("\ud800" <= char <= "\udfff" and not self._spell):
                raise _Malformed
            if char == '"':
                write((yield from self._scan.take()))
                return
            if char == "\\":
                write((yield from self._escape()))
            elif run := self._scan.take_run(_PLAIN):
                write(run)
            else:
                raw = self._scan.spell_markers((yield from self._scan.take()))
                write(json.dumps(raw, ensure_ascii=False)[1:-1])

    def _escape(self) -> Generator[None, None, str]:
        yield from self._scan.take()
        char = yield from self._scan.peek()
        if not char:
            raise _Malformed
        if char != "u":
            if char in '"\\/bfnrt':
                return "\\" + (yield from self._scan.take())
            return "\\\\"
        yield from self._scan.take()
        unit = yield from self._hex()
        if not "d800" <= unit.lower() <= "dbff":
            return f"\\u{unit}" if not "dc00" <= unit.lower() <= "dfff" else "\\ufffd"
        return (yield from self._low_surrogate(unit))

    def _low_surrogate(self, high: str) -> Generator[None, None, str]:
        if (yield from self._scan.peek()) != "\\":
            return "\\ufffd"
        yield from self._scan.take()
        char = yield from self._scan.peek()
        if char and char != "u":
            if char in '"\\/bfnrt':
                return "\\ufffd\\" + (yield from self._scan.take())
            return "\\ufffd\\\\"
        yield from self._scan.take()
        low = yield from self._hex()
        return f"\\u{high}\\u{low}" if "dc00" <= low.lower() <= "dfff" else "\\ufffd\\ufffd"

    def _hex(self) -> Generator[None, None, str]:
        digits = ""
        for _ in range(4):
            digits += yield from self._scan.take()
        if not _HEX.fullmatch(digits):
            raise _Malformed
        return digits


def copy_arguments(scanner: Scanner, sink: Sink, spell_markers: bool) -> Generator[None, None, bool]:
    """Copies a call's arguments, which must be an object; an object written as a JSON string is unwrapped, and
    anything else becomes `{}`. Whether they were whole."""
    yield from scanner.space()
    char = yield from scanner.peek()
    if char == "{":
        return (yield from JsonCopier(scanner, sink, spell_markers).copy())
    if char == "<" or "\ud800" <= char <= "\udfff":  # the call's end: no arguments at all
        sink("{}")
        return True
    parts: list[str] = []
    complete = yield from JsonCopier(scanner, parts.append, spell_markers).copy()
    text, known = _unwrap("".join(parts))
    sink(text)
    return complete and known


def _unwrap(text: str) -> tuple[str, bool]:
    try:
        value = json.loads(text)
        if isinstance(value, str):
            inner = value.strip() or "{}"
            return (inner, True) if isinstance(json.loads(inner), dict) else ("{}", False)
        return "{}", value is None
    except ValueError:
        return "{}", False

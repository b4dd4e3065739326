"""Calls between markers: a header with the name, then the arguments as JSON, or one JSON object for both."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from dataclasses import dataclass

from trillion_infer.text.tools.context import Context
from trillion_infer.text.tools.json_stream import JsonCopier, copy_arguments
from trillion_infer.text.tools.scanner import Reader, discard

_KIMI_ID = re.compile(r"(?:functions\.)?(?P<name>.+?):(?P<index>\d+)")


@dataclass(frozen=True)
class MarkedCalls:
    """`section_begin (call_begin header header_end JSON call_end)* section_end`.

    The name is what follows `type_end` in the header where there is one. `kimi_ids`: the header is
    `functions.NAME:INDEX`, which is also the call's id.
    """

    section_begin: str
    section_end: str
    call_begin: str
    call_end: str
    header_end: str
    type_end: str | None = None
    kimi_ids: bool = False
    interrupts_reasoning: bool = False

    @property
    def openers(self) -> tuple[str, ...]:
        return (self.section_begin, self.call_begin)

    @property
    def markers(self) -> tuple[str, ...]:
        own = (self.section_begin, self.section_end, self.call_begin, self.call_end, self.header_end)
        return own if self.type_end is None else (*own, self.type_end)

    def start(self, context: Context) -> Reader:
        yield from ()

    def read(self, context: Context, opener: str) -> Reader:
        """From behind `opener` to behind the section, or behind a call that stands alone."""
        in_section = opener == self.section_begin
        if not in_section:
            yield from self._call(context)
        while in_section:
            marker = yield from context.scan.until((self.call_begin, self.section_end), context.emit.content)
            if marker != self.call_begin:
                return
            in_section = yield from self._call(context)

    def _call(self, context: Context) -> Generator[None, None, bool]:
        """One call; whether its section goes on."""
        scan, emit = context.scan, context.emit
        header: list[str] = []
        marker = yield from scan.until((self.header_end, self.call_end, self.section_end), header.append)
        text = "".join(header)
        name, id = self._name(context, text)
        if marker != self.header_end or name is None:
            emit.content(text)
            if marker == self.header_end:
                marker = yield from scan.until((self.call_end, self.section_end), emit.content)
            return marker == self.call_end
        emit.start_call(name, id)
        complete = yield from copy_arguments(scan, emit.arguments, spell_markers=False)
        marker = yield from scan.until((self.call_end, self.section_end), discard)
        emit.end_call(complete)
        return marker == self.call_end

    def _name(self, context: Context, header: str) -> tuple[str | None, str | None]:
        if self.type_end is not None:
            header = header.rpartition(context.scan.resolve(self.type_end))[2]
        header, id = context.scan.drop_markers(header).strip(), None
        if self.kimi_ids:
            match = _KIMI_ID.fullmatch(header)
            name = match["name"] if match else header.removeprefix("functions.")
            expected = context.first_call + context.emit.calls
            index = max(int(match["index"]), context.first_call) if match else expected
            header, id = name, f"functions.{name}:{index}"
        return (header, id) if context.is_name(header) else (None, None)


@dataclass(frozen=True)
class JsonCalls:
    """`call_begin {"name": …, "arguments": …} call_end`, any number of times."""

    call_begin: str
    call_end: str
    interrupts_reasoning: bool = False

    @property
    def openers(self) -> tuple[str, ...]:
        return (self.call_begin,)

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.call_begin, self.call_end)

    def start(self, context: Context) -> Reader:
        yield from ()

    def read(self, context: Context, opener: str) -> Reader:
        scan, emit = context.scan, context.emit
        scan.set_mark()
        if (yield from read_call_object(context)):
            yield from scan.until((self.call_end,), discard)
        else:
            scan.rewind()
            yield from scan.until((self.call_end,), emit.content)


_CALL_KEYS = ("name", "function", "arguments", "parameters", "type", "id")


def read_call_object(context: Context, bare: bool = False) -> Generator[None, None, bool]:
    """One call written as a JSON object; a mark must be set. False if it is none: the caller rewinds.

    The mark is cleared as soon as the call has begun, from when on it will end as a call. A `bare` object, which
    no marker announces, must name a tool on offer and hold no foreign keys before that.
    """
    scan, emit = context.scan, context.emit
    name: str | None = None
    early: list[str] | None = None  # arguments that came before the name
    started, complete, key = False, True, None
    yield from scan.space()
    if (yield from scan.take()) != "{":
        return False
    while True:
        key, closed = yield from _key(context, behind_value=key is not None)
        if key is None:
            complete &= closed or started
            break
        if bare and name is None and key not in _CALL_KEYS:
            return False
        if key in ("arguments", "parameters") and not started and early is None:
            if name is None:
                early = []
                complete = yield from copy_arguments(scan, early.append, spell_markers=True)
            else:
                emit.start_call(name)
                scan.clear_mark()
                started = True
                complete = yield from copy_arguments(scan, emit.arguments, spell_markers=True)
        else:
            parts: list[str] = []
            complete = yield from JsonCopier(scan, parts.append, spell_markers=True).copy()
            if key in ("name", "function") and name is None and complete:
                name = json.loads("".join(parts))
                if not isinstance(name, str) or not (context.offers(name) if bare else context.is_name(name)):
                    return False
        if not complete:
            break
    if name is None:
        return False
    if not started:
        emit.start_call(name)
        scan.clear_mark()
        emit.arguments("".join(early or ()))
    emit.end_call(complete)
    return True


def _key(context: Context, behind_value: bool) -> Generator[None, None, tuple[str | None, bool]]:
    """(next key, False), its colon taken; (None, True) behind the closing brace; (None, False) at neither."""
    scan = context.scan
    yield from scan.space()
    char = yield from scan.peek()
    if behind_value and char == ",":
        yield from scan.take()
        yield from scan.space()
        char = yield from scan.peek()
    if char == "}":
        yield from scan.take()
        return None, True
    parts: list[str] = []
    if char != '"' or not (yield from JsonCopier(scan, parts.append, spell_markers=True).copy()):
        return None, False
    yield from scan.space()
    if (yield from scan.peek()) != ":":
        return None, False
    yield from scan.take()
    return json.loads("".join(parts)), False

"""Calls without markers of their own: a message that is JSON (Llama 3) or a Python list of calls (Llama 4)."""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass

from trillion_infer.text.tools.context import Context
from trillion_infer.text.tools.marked import read_call_object
from trillion_infer.text.tools.python_values import dump, keyword_arguments
from trillion_infer.text.tools.scanner import Reader, Sink

_NAME_RUN = re.compile(r"[\w.\-]+")
_BETWEEN = re.compile(r"[\s;,]+")
_CODE = re.compile(r"[^'\"()\[\]{}\\]+")
_QUOTED = {"'": re.compile(r"[^'\\]+"), '"': re.compile(r'[^"\\]+')}


@dataclass(frozen=True)
class BareJsonCalls:
    """`{"name": …, "parameters": …}` at the start of the message or behind `tag`, several joined by `;`."""

    tag: str
    interrupts_reasoning: bool = False

    @property
    def openers(self) -> tuple[str, ...]:
        return (self.tag,)

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.tag,)

    def start(self, context: Context) -> Reader:
        yield from self._calls(context)

    def read(self, context: Context, opener: str) -> Reader:
        yield from self._calls(context)

    def _calls(self, context: Context) -> Reader:
        scan = context.scan
        while True:
            scan.set_mark()
            yield from scan.take_all(_BETWEEN)
            if (yield from scan.peek()) != "{" or not (yield from read_call_object(context, bare=True)):
                scan.rewind()
                return


@dataclass(frozen=True)
class PythonicCalls:
    """`[f(a=1), g()]` at the start of the message or behind `begin`."""

    begin: str
    end: str
    interrupts_reasoning: bool = False

    @property
    def openers(self) -> tuple[str, ...]:
        return (self.begin,)

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.begin, self.end)

    def start(self, context: Context) -> Reader:
        yield from self._list(context)

    def read(self, context: Context, opener: str) -> Reader:
        yield from self._list(context)

    def _list(self, context: Context) -> Reader:
        scan = context.scan
        scan.set_mark()
        yield from scan.space()
        if (yield from scan.peek()) != "[":
            scan.rewind()
            return
        yield from scan.take()
        while True:
            yield from scan.space()
            if not (yield from self._call(context)):
                scan.rewind()
                return
            yield from scan.space()
            scan.set_mark()
            char = yield from scan.peek()
            if char not in (",", "]"):
                scan.rewind()
                return
            yield from scan.take()
            if char == "]":
                scan.clear_mark()
                return

    def _call(self, context: Context) -> Generator[None, None, bool]:
        """One call, told when its parenthesis closes; False (and nothing told) if it is none."""
        scan, emit = context.scan, context.emit
        name = yield from scan.take_all(_NAME_RUN)
        if not context.offers(name) or (yield from scan.take()) != "(":
            return False
        parts: list[str] = []
        closed = yield from _balanced(context, parts.append)
        arguments = keyword_arguments("".join(parts), self._parameters(context, name)) if closed else {}
        if arguments is None:
            return False
        emit.start_call(name)
        scan.clear_mark()
        emit.arguments(dump(arguments))
        emit.end_call(closed)
        return True

    def _parameters(self, context: Context, name: str) -> tuple[str, ...]:
        return tuple((context.tools or {}).get(name, {}).get("properties", {}))


def _balanced(context: Context, sink: Sink) -> Generator[None, None, bool]:
    """Python source up to the parenthesis that closes the call, which is taken; False at the end of the text."""
    scan, depth, quote = context.scan, 0, ""
    while char := (yield from scan.peek()):
        if run := scan.take_run(_QUOTED[quote] if quote else _CODE):
            sink(scan.spell_markers(run))
            continue
        yield from scan.take()
        if quote:
            if char == "\\":
                char += yield from scan.take()
            elif char == quote:
                quote = ""
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            if depth == 0:
                return char == ")"
            depth -= 1
        sink(scan.spell_markers(char))
    return False

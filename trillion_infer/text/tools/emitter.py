"""Turns what a format reads into events."""

from __future__ import annotations

from collections.abc import Callable

from trillion_infer.text.tools.events import (
    ArgumentsDelta,
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallEnd,
    ToolCallStart,
)
from trillion_infer.text.tools.scanner import Scanner

NewId = Callable[[str, int], str]


class Emitter:
    """Collects events until the machine takes them.

    White space around reasoning, and content's white space next to calls and reasoning, belongs to the markup and
    is not shown. `new_id(name, index)` names a call whose format carries no id.
    """

    def __init__(self, scanner: Scanner, new_id: NewId):
        self._scan = scanner
        self._new_id = new_id
        self._events: list[Event] = []
        self._content = _Trimmed(strip_leading=False)
        self._reasoning = _Trimmed(strip_leading=True)
        self._reasoned = False
        self._open = False
        self._wrote_arguments = False
        self.calls = 0

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def content(self, text: str) -> None:
        """Shown text; stray marker tokens in it are dropped."""
        if shown := self._content.push(self._scan.drop_markers(text)):
            self._events.append(ContentDelta(shown))

    def reasoning(self, text: str) -> None:
        """Reasoning text; markers in it are only mentioned."""
        if shown := self._reasoning.push(self._scan.spell_markers(text)):
            if self._reasoned and self._reasoning.fresh:
                shown = "\n" + shown
            self._reasoned, self._reasoning.fresh = True, False
            self._events.append(ReasoningDelta(shown))

    def end_reasoning(self) -> None:
        self._reasoning = _Trimmed(strip_leading=True)
        self._content.strip()

    def start_call(self, name: str, id: str | None = None) -> None:
        self._content.strip()
        self._open, self._wrote_arguments = True, False
        self._events.append(ToolCallStart(self.calls, id or self._new_id(name, self.calls), name))

    def arguments(self, text: str) -> None:
        if text:
            self._wrote_arguments = True
            self._events.append(ArgumentsDelta(self.calls, text))

    def end_call(self, complete: bool) -> None:
        if not self._wrote_arguments:
            self.arguments("{}")
        self._events.append(ToolCallEnd(self.calls, complete))
        self._open = False
        self.calls += 1

    def finish(self) -> None:
        """The end of the message: content's last white space is shown unless calls came."""
        assert not self._open
        if not self.calls and (rest := self._content.rest()):
            self._events.append(ContentDelta(rest))


class _Trimmed:
    """Text without the white space at its ends; white space inside waits for what follows it."""

    def __init__(self, strip_leading: bool):
        self._strip = strip_leading
        self._space = ""
        self.fresh = True

    def push(self, text: str) -> str:
        if self._strip:
            text = text.lstrip()
            self._strip = not text
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        return shown

    def strip(self) -> None:
        """Forgets waiting white space, and skips what follows."""
        self._space, self._strip = "", True

    def rest(self) -> str:
        space, self._space = self._space, ""
        return space

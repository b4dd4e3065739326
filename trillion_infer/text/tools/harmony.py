"""gpt-oss's harmony: a stream of messages on channels, each with a header."""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass

from trillion_infer.text.tools.context import Context
from trillion_infer.text.tools.json_stream import copy_arguments
from trillion_infer.text.tools.scanner import Reader, Scanner, Sink, discard

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
_RECIPIENT = re.compile(r"(?:^|\s)to=(\S+)")
_FIRST_WORD = re.compile(r"\s*(\w*)")
_LONGEST_HEADER = 512
_CHANNELS = ("analysis", "commentary", "final")


@dataclass(frozen=True)
class HarmonyCalls:
    """Analysis is reasoning, a recipient makes a message a call, everything else is content."""

    interrupts_reasoning: bool = False

    @property
    def openers(self) -> tuple[str, ...]:
        return ()

    @property
    def markers(self) -> tuple[str, ...]:
        return (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)

    def start(self, context: Context) -> Reader:
        """Reads the whole output, which begins behind `<|start|>assistant`."""
        while (yield from context.scan.peek()):
            yield from self._message(context)

    def read(self, context: Context, opener: str) -> Reader:
        yield from ()

    def _message(self, context: Context) -> Reader:
        scan, emit = context.scan, context.emit
        parts: list[str] = []
        marker = yield from scan.until((MESSAGE, *ENDS), parts.append, limit=_LONGEST_HEADER)
        header = "".join(parts)
        channel, recipient = _read_header(header, scan)
        if marker != MESSAGE:
            emit.content(_without_markup(header, scan))
            if marker is None:
                yield from self._body(context, emit.content)
        elif recipient is not None and context.is_name(recipient):
            yield from self._call(context, recipient)
        elif channel == "analysis":
            yield from self._body(context, emit.reasoning)
            emit.end_reasoning()
        else:
            if channel not in _CHANNELS:
                emit.content(_without_markup(header, scan))
            yield from self._body(context, emit.content)

    def _body(self, context: Context, sink: Sink) -> Generator[None, None, str | None]:
        return (yield from context.scan.until((*ENDS, START), sink))

    def _call(self, context: Context, recipient: str) -> Reader:
        scan, emit = context.scan, context.emit
        emit.start_call(recipient)
        complete = yield from copy_arguments(scan, emit.arguments, spell_markers=False)
        marker = yield from self._body(context, discard)
        emit.end_call(complete and marker is not None)


def _read_header(header: str, scan: Scanner) -> tuple[str, str | None]:
    """(channel, tool that is addressed or None). The recipient may stand on either side of the channel."""
    words = header
    for mark in (START, CHANNEL, CONSTRAIN):
        words = words.replace(scan.resolve(mark), " ")
    found = _RECIPIENT.search(words)
    recipient = found[1] if found and found[1] not in ("user", "assistant", "all") else None
    channel = _FIRST_WORD.match(header.partition(scan.resolve(CHANNEL))[2])
    return channel[1] if channel else "", recipient.removeprefix("functions.") if recipient else None


def _without_markup(header: str, scan: Scanner) -> str:
    for mark in (START, CHANNEL, CONSTRAIN):
        header = header.replace(scan.resolve(mark), "")
    return header.strip().removeprefix("assistant")

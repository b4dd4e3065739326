"""A cursor over text that is still arriving.

Readers are generators that yield when they need more input, so that a format is written as if the whole text
were there, and its answers cannot depend on how the text was cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence

Reader = Generator[None, None, None]
Sink = Callable[[str], None]
_SPACE = re.compile(r"\s*")


class Scanner:
    """Text pushed by the machine, taken by readers. `read` methods are used with `yield from`.

    A marker that the tokenizer holds as one token arrives as one character of `sentinels`, a lone surrogate
    that no decoded text contains; the same characters spelled out by other tokens are plain text.
    """

    def __init__(self, sentinels: dict[str, str] | None = None):
        self._buffer = ""
        self._at = 0
        self._mark: int | None = None
        self._ended = False
        self._sentinels = dict(sentinels or {})
        self._literals = {ord(char): literal for literal, char in self._sentinels.items()}
        self._dropped = dict.fromkeys(self._literals, "")

    def push(self, text: str) -> None:
        done = self._at if self._mark is None else self._mark
        self._buffer = self._buffer[done:] + text
        self._at -= done
        self._mark = None if self._mark is None else 0

    def end(self) -> None:
        """No more text will come: readers see the end instead of waiting."""
        self._ended = True

    def resolve(self, marker: str) -> str:
        """How `marker` appears in this stream: with a sentinel for each part that is a token, else as text."""
        for literal, char in self._sentinels.items():
            marker = marker.replace(literal, char)
        return marker

    def is_token(self, marker: str) -> bool:
        return marker in self._sentinels

    def drop_markers(self, text: str) -> str:
        """`text` without sentinels."""
        return text.translate(self._dropped)

    def spell_markers(self, text: str) -> str:
        """`text` with every sentinel replaced by the marker it stands for."""
        return text.translate(self._literals)

    def set_mark(self) -> None:
        """Remembers this position for `rewind`, until `clear_mark`."""
        self._mark = self._at

    def clear_mark(self) -> None:
        self._mark = None

    def rewind(self) -> None:
        """Goes back to the mark and clears it."""
        assert self._mark is not None
        self._at, self._mark = self._mark, None

    def peek(self) -> Generator[None, None, str]:
        """The next character, not taken; "" at the end."""
        while self._at == len(self._buffer):
            if self._ended:
                return ""
            yield
        return self._buffer[self._at]

    def take(self) -> Generator[None, None, str]:
        """The next character; "" at the end."""
        char = yield from self.peek()
        self._at += len(char)
        return char

    def take_run(self, pattern: re.Pattern[str]) -> str:
        """What matches `pattern` at the cursor in the text that is here; may be empty."""
        match = pattern.match(self._buffer, self._at)
        if match is None:
            return ""
        self._at = match.end()
        return match.group()

    def take_all(self, pattern: re.Pattern[str]) -> Generator[None, None, str]:
        """The longest run of characters that each match `pattern`, waiting for its end."""
        taken = []
        while (yield from self.peek()) and (run := self.take_run(pattern)):
            taken.append(run)
        return "".join(taken)

    def space(self) -> Generator[None, None, str]:
        """Takes white space."""
        return (yield from self.take_all(_SPACE))

    def until(self, markers: Sequence[str], sink: Sink, limit: int | None = None) -> Generator[None, None, str | None]:
        """Sends text to `sink` up to the first of `markers`, takes that one and returns it.

        Returns None at the end, or once `limit` characters passed without a marker beginning among them. Text
        that may begin a marker waits. Markers are given as in the format; no marker may lie inside another
        unless it ends it.
        """
        wanted = {self.resolve(marker): marker for marker in markers}
        search = re.compile("|".join(re.escape(m) for m in sorted(wanted, key=len, reverse=True)) or r"(?!)")
        left = limit
        while True:
            found = search.search(self._buffer, self._at)
            stop = len(self._buffer) if found is None else found.start()
            if found is None and not self._ended:
                stop = max(self._at, stop - _overlap(self._buffer, wanted))
            if left is not None and stop - self._at >= left:
                sink(self._advance(self._at + left))
                return None
            before = stop - self._at
            if before:
                sink(self._advance(stop))
                left = None if left is None else left - before
            if found is not None:
                self._at = found.end()
                return wanted[found.group()]
            if self._ended:
                return None
            yield

    def _advance(self, end: int) -> str:
        text = self._buffer[self._at : end]
        self._at = end
        return text


def _overlap(text: str, markers: dict[str, str]) -> int:
    """Length of the longest end of `text` that begins, but does not fill, one of `markers`."""
    longest = max((len(m) for m in markers), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        tail = text[-length:]
        if any(m.startswith(tail) for m in markers):
            return length
    return 0


def discard(_text: str) -> None:
    """A sink that keeps nothing."""

"""Stop strings in a stream of text."""

from collections.abc import Sequence

from trillion_infer.core.errors import InvalidRequestError


class StopMatcher:
    """Finds the first stop string a text completes, and holds back what may still become one.

    The match that ends first wins; of several that end together, the longest. Pieces emitted never hold a part
    of the stop string (unless `include_stop_str` asks for all of it), and their concatenation does not depend
    on how the text was cut. After a match the matcher swallows everything.
    """

    def __init__(self, stop: Sequence[str] = (), include_stop_str: bool = False):
        if isinstance(stop, str) or any(not isinstance(s, str) or not s for s in stop):
            raise InvalidRequestError(f"stop is {stop!r}; a list of non-empty strings is expected.", param="stop")
        self._patterns = [_Pattern(s) for s in dict.fromkeys(stop)]
        self._include = include_stop_str
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, allow_match: bool = True) -> tuple[str, str | None]:
        """(text that may be shown now, stop string that was completed or None).

        Only a stop string whose last character is in a `text` pushed with `allow_match` counts, so that
        min_tokens suppresses what was completed before it.
        """
        if self.matched is not None:
            return "", self.matched
        if not self._patterns:
            return text, None
        for index, char in enumerate(text):
            done = [p.text for p in self._patterns if p.advance(char)]
            if done and allow_match:
                return self._finish(self._held + text[: index + 1], max(done, key=len))
        seen = self._held + text
        cut = len(seen) - max(p.matched for p in self._patterns)
        self._held = seen[cut:]
        return seen[:cut], None

    def flush(self) -> str:
        """The text still held back, once no more will come."""
        held, self._held = self._held, ""
        return held

    def _finish(self, seen: str, stop: str) -> tuple[str, str]:
        self.matched, self._held = stop, ""
        return (seen if self._include else seen[: -len(stop)]), stop


class _Pattern:
    """Knuth-Morris-Pratt: `matched` is the length of the longest proper prefix of `text` that ends the input."""

    def __init__(self, text: str):
        self.text = text
        self.matched = 0
        self._fallback = [0] * (len(text) + 1)  # [n]: the longest border of the first n characters
        for n in range(1, len(text)):
            self._fallback[n + 1] = self._next(self._fallback[n], text[n])

    def advance(self, char: str) -> bool:
        """Consumes one character; whether it completed the pattern."""
        self.matched = self._next(self.matched, char)
        if self.matched < len(self.text):
            return False
        self.matched = self._fallback[self.matched]
        return True

    def _next(self, matched: int, char: str) -> int:
        while matched and self.text[matched] != char:
            matched = self._fallback[matched]
        return matched + 1 if self.text[matched] == char else 0

"""Joins a stream that broke and its second generation into one: nothing lost, nothing twice."""

import copy
from typing import Any

from trillion_infer.core.errors import TrillionInferError

Channel = tuple  # where text goes: (choice, field) or (choice, "tool_calls", call, field)


class ReplayDivergedError(TrillionInferError, RuntimeError):
    """The second generation is not a continuation of what the client has."""


class StreamRecord:
    """What the client has been sent, by channel. Only streams that may be replayed are recorded."""

    def __init__(self):
        self._sent: dict[Channel, list[str]] = {}
        self._once: set[Channel] = set()
        self._finished: set[int] = set()
        self._identity: dict[str, Any] = {}
        self._wait: dict[Channel, str] | None = None

    def add(self, event: dict[str, Any]) -> dict[str, Any] | None:
        """The part of `event` that the client does not have yet, or None; in a first generation all of it.

        Raises ReplayDivergedError where a replay differs from the text already sent.
        """
        if self._wait is None:
            self._note(event)
            return event
        return self._cut(event)

    def rewind(self) -> None:
        """A new generation starts; its text is compared with what was sent and skipped."""
        self._wait = {channel: "".join(pieces) for channel, pieces in self._sent.items()}

    def check_end(self) -> None:
        """Raises ReplayDivergedError if a generation ended before it reached what was sent."""
        behind = sorted(str(channel) for channel, text in (self._wait or {}).items() if text)
        if behind:
            raise ReplayDivergedError(f"the replay ended before the text already sent in {', '.join(behind)}.")

    def _note(self, event: dict[str, Any]) -> None:
        self._identity = self._identity or {name: event[name] for name in ("id", "created") if name in event}
        for choice in _choices(event):
            index = choice.get("index", 0)
            for holder, name, channel in _pieces(choice, index):
                value = holder[name]
                if channel[-1] in _TEXT:
                    self._sent.setdefault(channel, []).append(value)
                else:
                    self._once.add(channel)
            if choice.get("finish_reason"):
                self._finished.add(index)

    def _cut(self, event: dict[str, Any]) -> dict[str, Any] | None:
        event = copy.deepcopy(event) | {name: value for name, value in self._identity.items() if name in event}
        had_choices, kept = bool(event.get("choices")), []
        for choice in _choices(event):
            index = choice.get("index", 0)
            news = False
            for holder, name, channel in _pieces(choice, index):
                if channel[-1] in _TEXT:
                    holder[name] = self._skip(channel, holder[name])
                    news = news or bool(holder[name])
                elif channel in self._once:
                    del holder[name]
                else:
                    news = True
            reason = choice.get("finish_reason")
            if reason and any(text for channel, text in (self._wait or {}).items() if channel[0] == index):
                raise ReplayDivergedError(f"the replay of choice {index} ended before the text already sent.")
            if (news or reason) and index in self._finished:
                if news:
                    raise ReplayDivergedError(f"the replay of choice {index} goes on where the first stream ended.")
                continue
            if news or reason:
                _prune(choice)
                kept.append(choice)
        if had_choices:
            event["choices"] = kept
            if not kept and not event.get("usage"):
                return None
        self._note(event)
        return event

    def _skip(self, channel: Channel, text: str) -> str:
        waiting = (self._wait or {}).get(channel, "")
        shared = min(len(waiting), len(text))
        if waiting[:shared] != text[:shared]:
            raise ReplayDivergedError(f"the replay differs from the text already sent in {channel}.")
        if waiting and self._wait is not None:
            self._wait[channel] = waiting[shared:]
        return text[shared:]


_TEXT = ("text", "content", "reasoning_content", "reasoning", "refusal", "arguments")


def _choices(event: dict[str, Any]) -> list[dict[str, Any]]:
    choices = event.get("choices")
    return choices if isinstance(choices, list) else []


def _pieces(choice: dict[str, Any], index: int) -> list[tuple[dict[str, Any], str, Channel]]:
    """(holder, key, channel) of every piece of a choice: text that adds up, or a value that is sent once."""
    found = [(choice, "text", (index, "text"))] if isinstance(choice.get("text"), str) else []
    delta = choice.get("delta") or {}
    for name, value in delta.items():
        if (name in _TEXT and isinstance(value, str)) or (name not in (*_TEXT, "tool_calls") and value is not None):
            found.append((delta, name, (index, name)))
    for call in delta.get("tool_calls") or ():
        where = (index, "tool_calls", call.get("index", 0))
        found += [(call, name, (*where, name)) for name in ("id", "type") if call.get(name)]
        function = call.get("function") or {}
        found += [(function, name, (*where, name)) for name in ("name", "arguments") if function.get(name) is not None]
    return found


def _prune(choice: dict[str, Any]) -> None:
    """Drops tool calls of which the client has every part."""
    delta = choice.get("delta") or {}
    if delta.get("tool_calls"):
        calls = delta["tool_calls"]
        kept = [c for c in calls if c.get("id") or any((c.get("function") or {}).values())]
        delta["tool_calls"] = kept
        if not kept:
            del delta["tool_calls"]

"""Server-sent events of OpenAI's APIs, as bytes that are passed on and as the little that is read of them."""

import json
import re
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_RESPONSE_ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
_MAX_EVENT_BYTES = 16 * 2**20


async def split_events(pieces: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Whole events, each with its blank line, however the stream was cut. An unfinished last event is dropped.

    Raises ValueError for an event above 16 MiB.
    """
    held, searched = b"", 0
    async for piece in pieces:
        held += piece
        start = 0
        while found := _END.search(held, max(start, searched)):
            yield held[start : found.end()]
            start = found.end()
            searched = start
        held = held[start:]
        searched = max(0, len(held) - 3)
        if len(held) > _MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {_MAX_EVENT_BYTES} bytes")


def event_data(event: bytes) -> bytes:
    """The data lines of an event, joined."""
    lines = event.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))


def event_json(event: bytes) -> dict[str, Any] | None:
    """The JSON object an event holds, or None for comments, [DONE] and anything else."""
    data = event_data(event)
    if not data.startswith(b"{"):
        return None
    try:
        value = json.loads(data)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def make_event(value: dict[str, Any]) -> bytes:
    """An event that holds `value`."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def is_end(event: bytes, value: dict[str, Any] | None) -> bool:
    """Whether a stream ends with this event: [DONE], the last event of a response, or an error."""
    if value is None:
        return event_data(event) == b"[DONE]"
    return value.get("type") in _RESPONSE_ENDS or bool(value.get("error") and "choices" not in value)


def server_error(value: dict[str, Any]) -> str | None:
    """The message of an event by which a worker says that it failed; None for tokens and for client's errors."""
    error = value.get("error")
    if not error or "choices" in value:
        return None
    if not isinstance(error, dict):
        return str(error)
    code = error.get("code")
    if (isinstance(code, int) and code < 500) or error.get("type") == "invalid_request_error":
        return None
    return str(error.get("message"))


def has_tokens(value: dict[str, Any]) -> bool:
    """Whether an event carries generated text, a tool call or the end of a choice."""
    if str(value.get("type", "")).endswith(".delta"):
        return True
    choices = value.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        delta = choice.get("delta") or {}
        if choice.get("finish_reason") or choice.get("text"):
            return True
        if any(held for name, held in delta.items() if name != "role"):
            return True
    return False

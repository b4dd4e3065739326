"""What a model's output is made of, in the order it arrives, and the whole that the pieces make."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True)
class ContentDelta:
    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """A call begins. `index` counts the calls of this message; the name is whole and comes once."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ArgumentsDelta:
    """More of the call's arguments. All deltas of one call together are a JSON object."""

    index: int
    text: str


@dataclass(frozen=True)
class ToolCallEnd:
    """`complete` is False for a call that was cut off or malformed; its JSON is closed all the same."""

    index: int
    complete: bool


Event = ReasoningDelta | ContentDelta | ToolCallStart | ArgumentsDelta | ToolCallEnd


@dataclass
class ToolCall:
    id: str
    name: str
    arguments: str = ""
    complete: bool = False


@dataclass
class Message:
    """An assistant message put together from its events."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


def assemble(events: Iterable[Event]) -> Message:
    """The message that `events` add up to."""
    message = Message()
    for event in events:
        match event:
            case ReasoningDelta(text):
                message.reasoning += text
            case ContentDelta(text):
                message.content += text
            case ToolCallStart(_, id, name):
                message.tool_calls.append(ToolCall(id, name))
            case ArgumentsDelta(index, text):
                message.tool_calls[index].arguments += text
            case ToolCallEnd(index, complete):
                message.tool_calls[index].complete = complete
    return message

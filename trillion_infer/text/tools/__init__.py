"""Reasoning and tool calls in a model's output."""

from trillion_infer.text.tools.events import (
    ArgumentsDelta,
    ContentDelta,
    Event,
    Message,
    ReasoningDelta,
    ToolCall,
    ToolCallEnd,
    ToolCallStart,
    assemble,
)
from trillion_infer.text.tools.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    detect_reasoning_format,
    detect_tool_format,
    opens_reasoning,
    tool_format,
)
from trillion_infer.text.tools.machine import OutputParser

__all__ = [
    "REASONING_FORMATS",
    "TOOL_FORMATS",
    "ArgumentsDelta",
    "ContentDelta",
    "Event",
    "Message",
    "OutputParser",
    "ReasoningDelta",
    "ToolCall",
    "ToolCallEnd",
    "ToolCallStart",
    "assemble",
    "detect_reasoning_format",
    "detect_tool_format",
    "opens_reasoning",
    "tool_format",
]

"""Chat messages in OpenAI's shape, made plain for a template."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

from trillion_infer.core.errors import InvalidRequestError

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_REASONING = ("reasoning_content", "reasoning")


class JsonArguments(dict):
    """Arguments of a tool call: a mapping for templates that iterate or serialise it, and the caller's own
    JSON text for templates that add it to a string."""

    def __init__(self, text: str, value: dict[str, Any]):
        super().__init__(value)
        self.text = text

    def __str__(self) -> str:
        return self.text

    def __add__(self, other: str) -> str:
        return self.text + other

    def __radd__(self, other: str) -> str:
        return other + self.text


def normalize_messages(messages: Sequence[dict[str, Any]], keep_parts: bool) -> list[dict[str, Any]]:
    """Copies of `messages` with text parts joined (unless `keep_parts`) and tool arguments parsed.

    Raises InvalidRequestError that names the message and what is wrong with it.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise _invalid(f"messages is a {type(messages).__name__}; a list of messages is expected.")
    if not messages:
        raise _invalid("messages is empty; send at least one message.")
    return [_normalize(index, message, keep_parts) for index, message in enumerate(messages)]


def _normalize(index: int, message: Any, keep_parts: bool) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _invalid(f"messages[{index}] is {message!r:.200}; an object with a role and a content is expected.")
    plain = copy.deepcopy(message)
    content = plain.get("content")
    if isinstance(content, list):
        parts = [_text_part(index, part) for part in content]
        plain["content"] = parts if keep_parts else "\n".join(part["text"] for part in parts)
    elif content is None:
        plain["content"] = None if plain.get("tool_calls") else ""
    elif not isinstance(content, str):
        raise _invalid(
            f"messages[{index}].content is a {type(content).__name__}; a string or a list of parts is expected."
        )
    for number, call in enumerate(plain.get("tool_calls") or ()):
        _parse_arguments(f"messages[{index}].tool_calls[{number}]", call)
    reasoning = next((plain[name] for name in _REASONING if plain.get(name)), None)
    if reasoning is not None:
        plain.update(dict.fromkeys(_REASONING, reasoning))
    return plain


def calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    """A plain message whose tool calls, if it has any, stand in its content as Hermes' models write them."""
    calls = message.get("tool_calls")
    if not calls or isinstance(message.get("content"), list):
        return message
    functions = [{name: call["function"].get(name) for name in ("name", "arguments")} for call in calls]
    written = [f"<tool_call>\n{json.dumps(each, ensure_ascii=False)}\n</tool_call>" for each in functions]
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join(filter(None, [message.get("content"), *written]))}


def _text_part(index: int, part: Any) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _TEXT_PARTS:
        named = repr(kind) if kind is not None else repr(part)[:200]
        raise _invalid(
            f"messages[{index}] has a content part of type {named}; this model reads text only, send parts of "
            "type 'text'."
        )
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise _invalid(f"messages[{index}] has a {kind!r} part without its text; give it as a string.")
    return {"type": "text", "text": text}


def _parse_arguments(where: str, call: Any) -> None:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _invalid(f"{where} has no function with a name.")
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        function["arguments"] = JsonArguments("{}", {})
    elif isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except json.JSONDecodeError as error:
            raise _invalid(f"{where}.function.arguments is not valid JSON: {error}.") from error
        if not isinstance(value, dict):
            raise _invalid(f"{where}.function.arguments holds a {type(value).__name__}; an object is expected.")
        function["arguments"] = JsonArguments(arguments, value)


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="messages")

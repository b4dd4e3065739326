"""Reads the body of /v1/responses as a conversation."""

from typing import Any

from trillion_infer.serve.chat import ChatRequest
from trillion_infer.serve.errors import ApiError
from trillion_infer.serve.fields import Fields
from trillion_infer.serve.sampling import format_of, read_sampling, read_stream
from trillion_infer.serve.server import Server
from trillion_infer.serve.tool_choice import read_tools

_SAMPLING = "temperature top_p top_k min_p seed stop"
FIELDS = frozenset(
    f"{_SAMPLING} model input instructions max_output_tokens tools tool_choice parallel_tool_calls text stream "
    "stream_options reasoning truncation include top_logprobs background previous_response_id cache_salt "
    "session_id".split()
)
_LOGPROBS = "message.output_text.logprobs"
_INCLUDES = (_LOGPROBS, "reasoning.encrypted_content")
"""What `include` may name; reasoning is never encrypted here, so that the second changes nothing."""
_FUNCTION = ("name", "description", "parameters", "strict")


def read_response_request(body: Any, server: Server) -> ChatRequest:
    """Checks a body. Raises ApiError and InvalidRequestError."""
    fields = Fields(body, FIELDS)
    server.check_model(fields.need("model", str))
    for name in ("background", "previous_response_id"):
        if fields.take(name, str, bool):
            raise ApiError(400, f"{name} is not supported: nothing is kept between requests.", param=name)
    text = Fields(fields.take("text", dict, default={}), ("format", "verbosity"), "text").take("format", dict)
    stream, _ = read_stream(fields)
    _check_truncation(fields.take("truncation", str))
    fields.take("metadata", dict)
    reasoning = Fields(fields.take("reasoning", dict, default={}), ("effort", "summary"), "reasoning")
    effort = reasoning.take("effort", str)
    params = read_sampling(
        fields,
        "max_output_tokens",
        max_tokens=fields.take("max_output_tokens", int),
        logprobs=_logprobs(fields.take("include", list, default=[]), fields.take("top_logprobs", int)),
        structured_output=None if text is None else format_of(text, "text.format"),
    )
    tools = [_nested(tool, f"tools[{n}]") for n, tool in enumerate(fields.take("tools", list, default=[]))]
    choice = fields.take("tool_choice", str, dict)
    if isinstance(choice, dict):
        choice = {"type": choice.get("type"), "function": {k: v for k, v in choice.items() if k != "type"}}
    return ChatRequest(
        _messages(fields.need("input", str, list), fields.take("instructions", str)),
        params,
        read_tools(tools, choice, fields.take("parallel_tool_calls", bool, default=True)),
        {"reasoning_effort": effort} if effort else {},
        stream,
        salt=fields.take("cache_salt", str, default=""),
        session_id=fields.take("session_id", str),
    )


def _check_truncation(value: str | None) -> None:
    if value not in (None, "disabled"):
        raise ApiError(
            400, f"truncation is {value!r}; it must be disabled: no input is ever shortened.", param="truncation"
        )


def _logprobs(include: list[Any], count: int | None) -> int | None:
    """How many log-probabilities a token has beside its own; None for none at all."""
    for name in include:
        if name not in _INCLUDES:
            raise ApiError(400, f"include has {name!r}; it must be of: {', '.join(_INCLUDES)}.", param="include")
    return count or 0 if _LOGPROBS in include or count else None


def _nested(tool: Any, where: str) -> dict[str, Any]:
    """A tool as chat writes it."""
    fields = Fields(tool, ("type", *_FUNCTION), where)
    if fields.need("type", str) != "function":
        raise ApiError(400, f"{where}.type is {tool['type']!r}; only function is supported.", param=f"{where}.type")
    return {"type": "function", "function": fields.given(*_FUNCTION)}


def _messages(value: str | list[Any], instructions: str | None) -> list[Any]:
    messages: list[Any] = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(value, str):
        return [*messages, {"role": "user", "content": value}]
    if not value:
        raise ApiError(400, "input is an empty list; give at least one item.", param="input")
    for number, item in enumerate(value):
        _add(messages, item, f"input[{number}]")
    return messages


def _add(messages: list[Any], item: Any, where: str) -> None:
    """Adds an input item; calls in a row belong to one assistant message."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        role = "system" if item.get("role") == "developer" else item.get("role")
        messages.append({"role": role, "content": item.get("content")})
    elif kind == "function_call":
        fields = Fields(item, ("type", "id", "call_id", "name", "arguments", "status"), where)
        function = {"name": fields.need("name", str), "arguments": fields.need("arguments", str)}
        call = {"id": fields.need("call_id", str), "type": "function", "function": function}
        if not (messages and messages[-1]["role"] == "assistant"):
            messages.append({"role": "assistant", "content": None})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        fields = Fields(item, ("type", "id", "call_id", "output", "status"), where)
        call_id, output = fields.need("call_id", str), fields.need("output", str, list)
        messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
    elif kind != "reasoning":
        raise ApiError(
            400,
            f"{where} has the type {kind!r}; it must be message, function_call, function_call_output or reasoning.",
            param=where,
        )

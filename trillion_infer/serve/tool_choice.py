"""Tools on offer, which of them must be called, and the grammar that makes it so."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trillion_infer.constrain import Reasoning, message_grammar, schema_rule
from trillion_infer.core.errors import InvalidRequestError
from trillion_infer.core.sampling_params import StructuredOutput
from trillion_infer.serve.errors import ApiError
from trillion_infer.serve.fields import Fields
from trillion_infer.serve.server import Server

_FALLBACK = "hermes"
"""The call format of models whose template names none."""

_WORDS = ("auto", "required", "none")


@dataclass(frozen=True)
class ToolUse:
    """`tools` as the client gave them. `choice`: auto, required, none, or the name of the one to call."""

    tools: list[dict[str, Any]] = field(default_factory=list)
    choice: str = "auto"
    parallel: bool = True

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that may be called."""
        return [] if self.choice == "none" else self.tools


def read_tools(tools: Sequence[Any] | None, choice: Any, parallel: bool) -> ToolUse:
    """Checks chat's `tools`, `tool_choice` and `parallel_tool_calls`. Raises ApiError."""
    checked = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools or ())]
    names = [tool["function"]["name"] for tool in checked]
    if len(set(names)) < len(names):
        raise ApiError(400, f"tools have the names {names}; give each its own.", param="tools")
    if isinstance(choice, dict):
        outer = Fields(choice, ("type", "function"), "tool_choice")
        if outer.need("type", str) != "function":
            raise ApiError(400, "tool_choice.type must be function.", param="tool_choice.type")
        chosen = Fields(outer.need("function", dict), ("name",), "tool_choice.function").need("name", str)
        if chosen not in names:
            raise ApiError(400, f"tool_choice names {chosen!r}, which is none of: {names}.", param="tool_choice")
    else:
        chosen = choice or "auto"
        if chosen not in _WORDS:
            raise ApiError(
                400, f"tool_choice is {chosen!r}; it must be auto, required, none or a function.", param="tool_choice"
            )
        if chosen == "required" and not checked:
            raise ApiError(400, "tool_choice is required and there are no tools; give tools.", param="tool_choice")
    return ToolUse(checked, chosen, parallel)


def _tool(value: Any, where: str) -> dict[str, Any]:
    outer = Fields(value, ("type", "function"), where)
    if outer.take("type", str, default="function") != "function":
        raise ApiError(400, f"{where}.type is {value['type']!r}; only function is supported.", param=f"{where}.type")
    function = outer.need("function", dict)
    inner = Fields(function, ("name", "description", "parameters", "strict"), f"{where}.function")
    inner.need("name", str)
    inner.take("description", str)
    inner.take("parameters", dict)
    inner.take("strict", bool)
    return {"type": "function", "function": function}


def call_format(server: Server, use: ToolUse) -> str | None:
    """The format in which calls come; harmony also marks what is no call."""
    if server.tool_format == "harmony":
        return "harmony"
    return (server.tool_format or _FALLBACK) if use.offered else None


def message_structure(
    server: Server, use: ToolUse, spec: StructuredOutput | None, in_reasoning: bool
) -> StructuredOutput | None:
    """What the whole message must follow, calls and reasoning included; None where anything goes.

    Raises InvalidRequestError for what cannot be enforced, with the JSON pointer of a schema's keyword.
    """
    if spec is not None:
        server.reader.grammar(spec)
    for tool in use.offered:
        if tool["function"].get("strict"):
            server.reader.grammar(StructuredOutput(json_schema=tool["function"].get("parameters") or {}))
    format = call_format(server, use)
    wrapped = server.reasoning is not None or format == "harmony"
    if not use.offered and not (wrapped and spec is not None):
        return spec
    reasoning = server.reasoning
    try:
        grammar = message_grammar(
            server.tokenizer.added_tokens,
            format=format,
            tools=use.offered,
            choice=use.choice,
            parallel=use.parallel,
            reasoning=None if reasoning is None else Reasoning(reasoning.open, reasoning.close, in_reasoning),
            content=None if spec is None else _term(spec),
        )
    except (TypeError, AttributeError, KeyError) as error:
        raise InvalidRequestError(f"the parameters of a tool are no JSON schema: {error}.", param="tools") from error
    return StructuredOutput(grammar=grammar)


def _term(spec: StructuredOutput) -> str:
    """`spec` as a term of a Lark grammar."""
    if spec.json_schema is not None:
        schema: Mapping[str, Any] | str = spec.json_schema
        return schema_rule(json.loads(schema) if isinstance(schema, str) else schema)
    if spec.json_object:
        return schema_rule(None)
    if spec.regex is not None:
        return "/" + spec.regex.replace("/", r"\/") + "/"
    if spec.choice is not None:
        return "(" + " | ".join(json.dumps(text, ensure_ascii=False) for text in spec.choice) + ")"
    raise InvalidRequestError(
        "a grammar cannot be combined with tools or reasoning; give a schema, regex or choice.", param="guided_grammar"
    )

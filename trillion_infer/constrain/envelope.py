"""The grammar of a whole assistant message: reasoning, then content, calls, or content and then calls.

Text is free until the marker that announces a call; from there on the call is held to its tool's schema. So even
where the model decides (`tool_choice` auto) a call is well-formed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trillion_infer.constrain.call_shapes import CALL_SHAPES, CallShape
from trillion_infer.constrain.compiler import schema_rule
from trillion_infer.constrain.relax import relax_schema
from trillion_infer.core.errors import InvalidRequestError

_FREE = r"/(.|\n)*/"
# The message of a bare format is a call as soon as it begins like one.
_FREE_UNLESS_BARE = r"/([^{\[\s](.|\n)*)?/"


@dataclass(frozen=True)
class Reasoning:
    """Markers of the reasoning; `is_open` if the prompt already opened it."""

    open: str
    close: str
    is_open: bool = False


def message_grammar(
    added_tokens: Mapping[str, int],
    *,
    format: str | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    choice: str = "auto",
    parallel: bool = True,
    reasoning: Reasoning | None = None,
    content: str | None = None,
) -> str:
    """A Lark grammar for GrammarCompiler.compile.

    added_tokens: Tokenizer.added_tokens; markers among them must come as those tokens.
    format: name in CALL_SHAPES, for calls of `tools` (OpenAI's shape).
    choice: "auto", "required", or the name of the one tool that must be called.
    parallel: more than one call may follow.
        A tool's schema is enforced as far as it can be; one marked `strict` is refused if that is not all of it.
    content: a Lark term (see `schema_rule`) that content must match; free text if None. With calls on offer the
        message is then either that or calls.
    """
    rules = _Rules(added_tokens)
    shape = _shape(format) if tools and choice != "none" else None
    head = rules.reasoning(reasoning, harmony=format == "harmony")
    free = _FREE_UNLESS_BARE if shape and shape.bare else _FREE
    text = rules.content(content or rules.rule(free), harmony=format == "harmony")
    if shape is None:
        body = text
    else:
        chosen = [tool for tool in map(_function, tools) if choice in ("auto", "required", tool["name"])]
        if not chosen:
            names = ", ".join(tool["name"] for tool in map(_function, tools))
            raise InvalidRequestError(f"tool_choice names {choice!r}, which is none of: {names}.", param="tool_choice")
        calls = rules.calls(shape, chosen, parallel)
        lead = rules.literal(shape.begin)
        if choice != "auto":
            body = f"{lead} {calls}"
        elif content is not None or shape.bare or format == "harmony":
            body = f"({text} | {lead} {calls})"
        else:
            body = f"({rules.text_until(shape.begin)} {calls} | {text})"
    return rules.grammar(f"{head} {body}")


class _Rules:
    """Named rules of one grammar, and how literals are written in it."""

    def __init__(self, added_tokens: Mapping[str, int]):
        self._tokens = added_tokens
        marks = sorted((text for text in added_tokens if len(text) > 2), key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, marks)) or r"(?!)")
        self._rules: list[str] = []

    def grammar(self, start: str) -> str:
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules, ""])

    def rule(self, body: str, options: str = "") -> str:
        """Adds a rule and returns its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def literal(self, text: str) -> str:
        """`text` as terms: markers that are tokens by their ids, the rest as strings."""
        if "\0" in text:
            return " ".join(self.literal(part) for part in text.split("\0"))
        terms, at = [], 0
        for match in self._marks.finditer(text):
            terms += [_quote(text[at : match.start()]), f"<[{self._tokens[match.group()]}]>"]
            at = match.end()
        return " ".join(term for term in [*terms, _quote(text[at:])] if term) or '""'

    def text_until(self, marker: str, free: str = _FREE) -> str:
        """Free text, and `marker` behind it."""
        found = self._marks.match(marker)
        if found is not None:
            return f"{self.rule(free)} {self.literal(marker)}"
        return self.rule(f"{free} {_quote(marker)}", "[lazy]")

    def reasoning(self, reasoning: Reasoning | None, harmony: bool) -> str:
        if harmony:
            opened = self.literal("<|channel|>analysis<|message|>")
            closed = self.literal("<|start|>assistant")
            return f"({opened} {self.text_until('<|end|>')} {closed})*"
        if reasoning is None:
            return ""
        inside = f"{self.text_until(reasoning.close)} /\\n{{0,2}}/"
        return inside if reasoning.is_open else f"({self.literal(reasoning.open)} {inside})?"

    def content(self, term: str, harmony: bool) -> str:
        if not harmony:
            return term
        constrained = self.literal(" <|constrain|>json")
        return f"{self.literal('<|channel|>final')} ({constrained})? {self.literal('<|message|>')} {term}"

    def calls(self, shape: CallShape, tools: Sequence[Mapping[str, Any]], parallel: bool) -> str:
        """Everything behind `shape.begin`."""
        call = self.rule(" | ".join(self._call(shape, tool) for tool in tools))
        end = self.literal(shape.end) if shape.end else ""
        if shape.single or not parallel:
            return f"{call} {end}"
        separator = self.literal(shape.separator) if shape.separator else ""
        return f"{call} ({separator} {call})* {end}"

    def _call(self, shape: CallShape, tool: Mapping[str, Any]) -> str:
        before, schema = shape.before.replace("{name}", tool["name"]), tool.get("parameters") or {"type": "object"}
        if not tool.get("strict"):
            schema = relax_schema(schema)
        lead, numbered, rest = before.partition("{index}")
        terms = [self.literal(lead), "/[0-9]{1,4}/" if numbered else "", self.literal(rest) if rest else ""]
        if shape.parameter is None:
            terms.append(self.rule(schema_rule(schema)))
        else:
            terms.append(
                self._parameters(shape, schema if isinstance(schema, Mapping) else {}, bool(tool.get("strict")))
            )
        terms.append(self.literal(shape.after) if shape.after else "")
        return " ".join(term for term in terms if term)

    def _parameters(self, shape: CallShape, schema: Mapping[str, Any], strict: bool) -> str:
        """Parameters in the schema's order, the optional ones each or not."""
        required = set(schema.get("required", ()))
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        pieces = [
            (self._parameter(shape, key, inner, definitions, strict), key in required)
            for key, inner in schema.get("properties", {}).items()
        ]
        if not shape.joint:
            return " ".join(piece if needed else f"({piece})?" for piece, needed in pieces)
        joint, behind, first, skippable = _quote(shape.joint), "", [], True
        for piece, needed in reversed(pieces):
            first = [f"{piece} {behind}"] if needed else [f"{piece} {behind}", *first]
            skippable = skippable and not needed
            behind = self.rule(f"{joint} {piece} {behind}" if needed else f"({joint} {piece})? {behind or ''}")
        if not first:
            return ""
        return f"({' | '.join(first)}){'?' if skippable else ''}"

    def _parameter(self, shape: CallShape, key: str, schema: Any, definitions: Mapping[str, Any], strict: bool) -> str:
        before, _, after = str(shape.parameter).partition("{value}")
        before = before.replace("{key}", key)
        texts = None if shape.json_strings else _texts(schema)
        before = before.replace("{flag}", "false" if texts is None else "true")
        if texts is None:
            whole = {**definitions, **schema} if isinstance(schema, Mapping) else schema
            value = self.rule(schema_rule(whole if strict else relax_schema(whole)))
            return self.rule(f"{self.literal(before)} {value} {self.literal(after) if after else ''}")
        if texts:
            options = " | ".join(_quote(text) for text in texts)
            return self.rule(f"{self.literal(before)} ({options}) {self.literal(after)}")
        return self.rule(f"{self.literal(before)} {self.text_until(after)}")


def _texts(schema: Any) -> list[str] | None:
    """None for a parameter that is no string; else the strings it is limited to, none for free text."""
    if not isinstance(schema, Mapping):
        return None
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if listed is not None:
        return list(listed) if listed and all(isinstance(text, str) and text for text in listed) else None
    return [] if schema.get("type") == "string" else None


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function", tool)
    if not isinstance(function, Mapping) or not re.fullmatch(r"[\w.\-]{1,128}", str(function.get("name", ""))):
        raise InvalidRequestError(f"a tool has no usable name: {tool!r:.120}.", param="tools")
    return function


def _shape(format: str | None) -> CallShape:
    if format not in CALL_SHAPES:
        raise InvalidRequestError(
            f"calls cannot be constrained in the format {format!r}; choose from {', '.join(CALL_SHAPES)}.",
            param="tools",
        )
    return CALL_SHAPES[format]


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""

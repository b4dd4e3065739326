"""Conversations to prompts, by the model's own Jinja template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, ClassVar

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trillion_infer.core.errors import InvalidRequestError, ModelLoadError
from trillion_infer.text.messages import calls_as_text, normalize_messages
from trillion_infer.text.tokenizer import Tokenizer

_CONTINUE_MARK = "\ue000continue\ue001"


class ChatTemplate:
    """A compiled chat template. `variables` are the special tokens it may write (`bos_token`, …)."""

    def __init__(self, source: str, variables: dict[str, str] | None = None):
        environment = _environment()
        try:
            self._takes_parts = _iterates_content(environment.parse(source))
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelLoadError(
                f"the chat template has a syntax error in line {error.lineno}: {error.message}."
            ) from error
        self._takes_calls = "tool_calls" in source
        self.source = source
        self._variables = dict(variables or {})

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """The prompt for `messages` (OpenAI's shape). Raises InvalidRequestError with the template's own
        message where it refuses them. A template that knows no calls gets them as text, as Hermes writes them.
        `continue_final_message` leaves the last message open."""
        plain = normalize_messages(messages, keep_parts=self._takes_parts)
        if not self._takes_calls:
            plain = [calls_as_text(message) for message in plain]
        if continue_final_message:
            add_generation_prompt = False
            final = plain[-1].get("content")
            if not isinstance(final, str):
                raise InvalidRequestError(
                    "continue_final_message needs a last message whose content is a string.", param="messages"
                )
            plain[-1]["content"] = final.rstrip() + _CONTINUE_MARK
        variables = {"documents": None, **self._variables, **template_kwargs}
        try:
            text = self._template.render(
                messages=plain,
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except jinja2.TemplateError as error:
            raise InvalidRequestError(f"the chat template refuses this: {error.message}", param="messages") from error
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise InvalidRequestError(
                f"the chat template fails on these messages: {type(error).__name__}: {error}", param="messages"
            ) from error
        return text[: text.rindex(_CONTINUE_MARK)] if continue_final_message else text


def chat_template(tokenizer: Tokenizer, override: str | None = None) -> ChatTemplate:
    """The tokenizer's template compiled, or `override`. Compile once and keep it."""
    source = override if override is not None else tokenizer.chat_template
    if source is None:
        raise InvalidRequestError(
            "this model has no chat template; send a plain prompt, or give a template of your own "
            "(a Jinja text) with the option chat_template.",
            param="messages",
        )
    return ChatTemplate(source, tokenizer.template_variables)


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **template_kwargs: Any,
) -> str:
    """The prompt text for `messages`; see ChatTemplate.render."""
    template = chat_template(tokenizer)
    return template.render(messages, tools, add_generation_prompt, **template_kwargs)


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **template_kwargs: Any,
) -> list[int]:
    """Token ids of the rendered prompt. The template alone decides about BOS, so there is never a second one."""
    text = render_chat(tokenizer, messages, tools, add_generation_prompt, **template_kwargs)
    return tokenizer.encode(text, add_special_tokens=False)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it: no HTML escapes, characters beyond ASCII as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it only renders."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _iterates_content(tree: nodes.Template) -> bool:
    """Whether the template loops over a message's content, so that it takes a list of parts."""
    return any(_names_content(loop.iter) for loop in tree.find_all(nodes.For))


def _names_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Name):
        return node.name.endswith("content")
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Filter) and node.node is not None and _names_content(node.node)

"""The formats of tool calls and reasoning that models were trained on, and how to tell a model's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from trillion_infer.core.errors import InvalidRequestError
from trillion_infer.text.tokenizer import Tokenizer
from trillion_infer.text.tools.bare import BareJsonCalls, PythonicCalls
from trillion_infer.text.tools.context import Context
from trillion_infer.text.tools.harmony import HarmonyCalls
from trillion_infer.text.tools.marked import JsonCalls, MarkedCalls
from trillion_infer.text.tools.markup import MarkupCalls
from trillion_infer.text.tools.scanner import Reader


class CallFormat(Protocol):
    """How one family writes calls. `start` reads what a message may begin with; `read` what follows an opener."""

    @property
    def openers(self) -> tuple[str, ...]: ...

    @property
    def markers(self) -> tuple[str, ...]: ...

    @property
    def interrupts_reasoning(self) -> bool: ...

    def start(self, context: Context) -> Reader: ...

    def read(self, context: Context, opener: str) -> Reader: ...


@dataclass(frozen=True)
class ReasoningFormat:
    open: str
    close: str


TOOL_FORMATS: dict[str, CallFormat] = {
    "kimi_k2": MarkedCalls(
        section_begin="<|tool_calls_section_begin|>",
        section_end="<|tool_calls_section_end|>",
        call_begin="<|tool_call_begin|>",
        call_end="<|tool_call_end|>",
        header_end="<|tool_call_argument_begin|>",
        kimi_ids=True,
        interrupts_reasoning=True,
    ),
    "deepseek_v3": MarkedCalls(
        section_begin="<｜tool▁calls▁begin｜>",
        section_end="<｜tool▁calls▁end｜>",
        call_begin="<｜tool▁call▁begin｜>",
        call_end="<｜tool▁call▁end｜>",
        header_end="\n```json",
        type_end="<｜tool▁sep｜>",
    ),
    "deepseek_v31": MarkedCalls(
        section_begin="<｜tool▁calls▁begin｜>",
        section_end="<｜tool▁calls▁end｜>",
        call_begin="<｜tool▁call▁begin｜>",
        call_end="<｜tool▁call▁end｜>",
        header_end="<｜tool▁sep｜>",
    ),
    "deepseek_v32": MarkupCalls(
        begin="<｜DSML｜function_calls>",
        end="</｜DSML｜function_calls>",
        call_open='<｜DSML｜invoke name="',
        call_close='">',
        call_end="</｜DSML｜invoke>",
        param_open='<｜DSML｜parameter name="',
        param_close=">",
        param_end="</｜DSML｜parameter>",
        flagged=True,
    ),
    "hermes": JsonCalls("<tool_call>", "</tool_call>"),
    "qwen3_coder": MarkupCalls(
        begin="<tool_call>",
        end="</tool_call>",
        call_open="<function=",
        call_close=">",
        call_end="</function>",
        param_open="<parameter=",
        param_close=">",
        param_end="</parameter>",
        trims_newline=True,
    ),
    "glm": MarkupCalls(
        begin="<tool_call>",
        end="</tool_call>",
        call_open="",
        call_close="",
        call_end="</tool_call>",
        param_open="<arg_key>",
        key_end="</arg_key>",
        param_close="<arg_value>",
        param_end="</arg_value>",
    ),
    "minimax": MarkupCalls(
        begin="<minimax:tool_call>",
        end="</minimax:tool_call>",
        call_open='<invoke name="',
        call_close='">',
        call_end="</invoke>",
        param_open='<parameter name="',
        param_close='">',
        param_end="</parameter>",
        trims_newline=True,
    ),
    "llama3": BareJsonCalls(tag="<|python_tag|>"),
    "llama4": PythonicCalls(begin="<|python_start|>", end="<|python_end|>"),
    "harmony": HarmonyCalls(),
}

REASONING_FORMATS = {"think": ReasoningFormat("<think>", "</think>")}

# The first line whose signs all stand in the chat template decides.
_SIGNS = (
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("｜DSML｜",), "deepseek_v32"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("minimax:tool_call",), "minimax"),
    (("<arg_key>",), "glm"),
    (("<function=",), "qwen3_coder"),
    (("<tool_call>",), "hermes"),
    (("<|channel|>",), "harmony"),
    (("<|python_start|>",), "llama4"),
    (("<|python_tag|>",), "llama3"),
    (('"parameters": dictionary of argument name',), "llama3"),
)


def tool_format(name: str) -> CallFormat:
    """The format called `name`; InvalidRequestError lists the names there are."""
    if name not in TOOL_FORMATS:
        raise InvalidRequestError(f"there is no tool-call format {name!r}; choose from {', '.join(TOOL_FORMATS)}.")
    return TOOL_FORMATS[name]


def detect_tool_format(tokenizer: Tokenizer) -> str | None:
    """The name of the format that the model's chat template writes, None if it writes none known."""
    template = tokenizer.chat_template or ""
    return next((name for signs, name in _SIGNS if all(sign in template for sign in signs)), None)


def detect_reasoning_format(tokenizer: Tokenizer) -> str | None:
    """The name of the reasoning format of the model: told by its tokens or its chat template."""
    template = tokenizer.chat_template or ""
    for name, format in REASONING_FORMATS.items():
        if format.close in tokenizer.added_tokens or format.close in template:
            return name
    return None


def opens_reasoning(prompt_tail: str, format: ReasoningFormat | None) -> bool:
    """Whether a prompt that ends with `prompt_tail` has already opened the reasoning."""
    return format is not None and prompt_tail.rstrip().endswith(format.open)

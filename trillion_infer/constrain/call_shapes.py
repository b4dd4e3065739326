"""How each family writes a call, as pieces a grammar is made of. Names are those of text.tools.TOOL_FORMATS."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CallShape:
    """`begin call (separator call)* end`, each call `before ARGUMENTS after`.

    `{name}` in `before` is the tool's name, `{index}` a number. ARGUMENTS are a JSON object unless `parameter` says
    how each parameter stands: `{key}` in it is its name, `{value}` its value and `{flag}` whether it is a string;
    `joint` stands between parameters. NUL parts what JSON reads one after the other, so that the start of a call and
    of a JSON answer can be told apart later than at their first character. A `bare` format announces its calls by
    nothing but their own text.
    """

    begin: str
    before: str
    after: str
    end: str
    separator: str = ""
    parameter: str | None = None
    joint: str = ""
    json_strings: bool = False
    bare: bool = False
    single: bool = False


CALL_SHAPES = {
    "kimi_k2": CallShape(
        begin="<|tool_calls_section_begin|>",
        before="<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>",
        after="<|tool_call_end|>",
        end="<|tool_calls_section_end|>",
    ),
    "deepseek_v3": CallShape(
        begin="<｜tool▁calls▁begin｜>",
        before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
        after="\n```<｜tool▁call▁end｜>",
        end="<｜tool▁calls▁end｜>",
        separator="\n",
    ),
    "deepseek_v31": CallShape(
        begin="<｜tool▁calls▁begin｜>",
        before="<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
        after="<｜tool▁call▁end｜>",
        end="<｜tool▁calls▁end｜>",
    ),
    "deepseek_v32": CallShape(
        begin="<｜DSML｜function_calls>\n",
        before='<｜DSML｜invoke name="{name}">\n',
        parameter='<｜DSML｜parameter name="{key}" string="{flag}">{value}</｜DSML｜parameter>\n',
        after="</｜DSML｜invoke>\n",
        end="</｜DSML｜function_calls>",
    ),
    "hermes": CallShape(
        begin="<tool_call>",
        before='\n{"name": "{name}", "arguments": ',
        after="}\n</tool_call>",
        end="",
        separator="\n<tool_call>",
    ),
    "qwen3_coder": CallShape(
        begin="<tool_call>",
        before="\n<function={name}>\n",
        parameter="<parameter={key}>\n{value}\n</parameter>\n",
        after="</function>\n</tool_call>",
        end="",
        separator="\n<tool_call>",
    ),
    "glm": CallShape(
        begin="<tool_call>",
        before="{name}\n",
        parameter="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
        after="</tool_call>",
        end="",
        separator="\n<tool_call>",
    ),
    "minimax": CallShape(
        begin="<minimax:tool_call>\n",
        before='<invoke name="{name}">\n',
        parameter='<parameter name="{key}">{value}</parameter>\n',
        after="</invoke>\n",
        end="</minimax:tool_call>",
    ),
    "llama3": CallShape(
        begin="",
        before='{\0"name"\0: "{name}", "parameters": ',
        after="}",
        end="",
        separator="; ",
        bare=True,
    ),
    "llama4": CallShape(
        begin="[",
        before="{name}(",
        parameter="{key}={value}",
        joint=", ",
        after=")",
        end="]",
        separator=", ",
        json_strings=True,
        bare=True,
    ),
    "harmony": CallShape(
        begin="<|channel|>commentary to=functions.",
        before="{name} <|constrain|>json<|message|>",
        after="",
        end="",
        single=True,
    ),
}

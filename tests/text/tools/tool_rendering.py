"""Writes messages as models of each family do, the reverse of what is tested."""

import json

from trillion_infer.text.tools import Event, Message, OutputParser, assemble, tool_format
from trillion_infer.text.tools.formats import REASONING_FORMATS

THINK = REASONING_FORMATS["think"]


def call_id(name: str, index: int) -> str:
    return f"call_{index}"


def dumps(value) -> str:
    return json.dumps(value, ensure_ascii=False)


def plain(value) -> str:
    """A parameter in markup: strings as they are, the rest as JSON."""
    return value if isinstance(value, str) else dumps(value)


def render_calls(format: str, calls: list[tuple[str, dict]]) -> str:
    return {
        "kimi_k2": _kimi,
        "deepseek_v3": _deepseek_v3,
        "deepseek_v31": _deepseek_v31,
        "deepseek_v32": _deepseek_v32,
        "hermes": _hermes,
        "qwen3_coder": _qwen3_coder,
        "glm": _glm,
        "minimax": _minimax,
        "llama3": lambda calls: "; ".join(dumps({"name": n, "parameters": a}) for n, a in calls),
        "llama4": _llama4,
        "harmony": _harmony,
    }[format](calls)


def render(format: str, reasoning: str, content: str, calls: list[tuple[str, dict]]) -> str:
    """A whole output. Llama formats have calls or content, and harmony marks both itself."""
    if format == "harmony":
        parts = [f"<|channel|>analysis<|message|>{reasoning}<|end|>"] if reasoning else []
        parts += [f"<|channel|>final<|message|>{content}<|end|>"] if content else []
        return "<|start|>assistant".join(parts + [_harmony([call]) for call in calls])
    head = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    tail = "\n\n" + render_calls(format, calls) if calls else ""
    return head + content + (tail if content else tail.lstrip())


def parser(format: str, tokenizer=None, tools=None, **options) -> OutputParser:
    reasoning = None if format == "harmony" else THINK
    return OutputParser(tokenizer, tool_format(format), reasoning, tools=tools, new_id=call_id, **options)


def run_text(parser: OutputParser, pieces: list[str]) -> list[Event]:
    return [event for piece in pieces for event in parser.push_text(piece)] + parser.finish()


def run_ids(parser: OutputParser, pieces: list[list[int]]) -> list[Event]:
    return [event for piece in pieces for event in parser.push(piece)] + parser.finish()


def parse(format: str, text: str, **options) -> Message:
    return assemble(run_text(parser(format, **options), [text]))


def _kimi(calls):
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{dumps(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def _deepseek_v3(calls):
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def _deepseek_v31(calls):
    inner = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumps(arguments)}<｜tool▁call▁end｜>" for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def _deepseek_v32(calls):
    lines = []
    for name, arguments in calls:
        lines.append(f'<｜DSML｜invoke name="{name}">')
        for key, value in arguments.items():
            flag = "true" if isinstance(value, str) else "false"
            lines.append(f'<｜DSML｜parameter name="{key}" string="{flag}">{plain(value)}</｜DSML｜parameter>')
        lines.append("</｜DSML｜invoke>")
    return "\n".join(["<｜DSML｜function_calls>", *lines, "</｜DSML｜function_calls>"])


def _hermes(calls):
    return "\n".join(f"<tool_call>\n{dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls)


def _qwen3_coder(calls):
    def one(name, arguments):
        inner = "".join(f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def _glm(calls):
    def one(name, arguments):
        pairs = (f"<arg_key>{k}</arg_key>\n<arg_value>{plain(v)}</arg_value>\n" for k, v in arguments.items())
        return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"

    return "\n".join(one(*call) for call in calls)


def _minimax(calls):
    lines = []
    for name, arguments in calls:
        lines.append(f'<invoke name="{name}">')
        lines += [f'<parameter name="{key}">{plain(value)}</parameter>' for key, value in arguments.items()]
        lines.append("</invoke>")
    return "\n".join(["<minimax:tool_call>", *lines, "</minimax:tool_call>"])


def _llama4(calls):
    def one(name, arguments):
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"

    return f"[{', '.join(one(*call) for call in calls)}]"


def _harmony(calls):
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumps(arguments)}<|call|>"
        for name, arguments in calls
    )

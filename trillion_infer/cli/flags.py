"""absl flags made from the signatures of LLM and SamplingParams, so that the two can never differ."""

import dataclasses
import importlib
import inspect
import logging
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

from absl import app, flags

from trillion_infer.cli.platform import settle_platform
from trillion_infer.core.sampling_params import SamplingParams

flags.disclaim_key_flags()

_NOT_FLAGS = {"self", "progress", "mesh_object"}
_SAMPLING = (
    "max_tokens temperature top_p top_k min_p n stop stop_token_ids include_stop_str_in_output min_tokens logprobs "
    "prompt_logprobs repetition_penalty presence_penalty frequency_penalty bad_words ignore_eos skip_special_tokens"
).split()
_LISTS = {"stop": str, "bad_words": str, "stop_token_ids": int}


def define_llm_flags(**defaults: Any) -> Callable[[], dict[str, Any]]:
    """A flag for every keyword of LLM; returns a function that reads them. `defaults` replace LLM's own."""
    llm = importlib.import_module("trillion_infer.llm").LLM
    help_by_name = _argument_help(llm.__doc__ or "")
    names = []
    for name, parameter in inspect.signature(llm.__init__).parameters.items():
        if name in _NOT_FLAGS:
            continue
        default = defaults.get(name, None if parameter.default is inspect.Parameter.empty else parameter.default)
        text = help_by_name.get(name, f"LLM's {name}; see its documentation.")
        _define(name, _scalar_type(parameter.annotation), default, text)
        names.append(name)
    flags.mark_flag_as_required("model")
    return lambda: {name: flags.FLAGS[name].value for name in names}


def define_sampling_flags(**defaults: Any) -> Callable[[], dict[str, Any]]:
    """A flag for the fields of SamplingParams that fit a command line; returns a function that reads them."""
    fields = {field.name: field for field in dataclasses.fields(SamplingParams)}
    hints = typing.get_type_hints(SamplingParams)
    for name in _SAMPLING:
        text = f"SamplingParams.{name}."
        if name in _LISTS:
            define = flags.DEFINE_multi_string if _LISTS[name] is str else flags.DEFINE_multi_integer
            define(name, defaults.get(name, []), f"{text} May be given several times.")
        else:
            _define(name, _scalar_type(hints[name]), defaults.get(name, fields[name].default), text)
    return lambda: {name: flags.FLAGS[name].value for name in _SAMPLING}


def define_dataclass_flags(kind: Any, help_by_name: Mapping[str, str]) -> Callable[[], dict[str, Any]]:
    """A flag for every field of a dataclass with defaults; returns a function that reads them."""
    names = []
    for field in dataclasses.fields(kind):
        _define(field.name, type(field.default), field.default, help_by_name[field.name])
        names.append(field.name)
    return lambda: {name: flags.FLAGS[name].value for name in names}


def _define(name: str, kind: type, default: Any, text: str) -> None:
    define = {bool: flags.DEFINE_bool, int: flags.DEFINE_integer, float: flags.DEFINE_float}.get(
        kind, flags.DEFINE_string
    )
    define(name, default, text)


def _scalar_type(annotation: Any) -> type:
    """The first of bool, int, float, str that an annotation allows (`int | None` is int)."""
    allowed = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return next((kind for kind in (bool, int, float, str) if kind in allowed), str)


def _argument_help(doc: str) -> dict[str, str]:
    """Sentences of an Args section by argument name."""
    found = {}
    for line in re.sub(r"\n {8,}", " ", doc.partition("Args:")[2].partition("Raises")[0]).splitlines():
        for name, text in re.findall(r"(\w+): (.+?)(?=(?:\. \w+: )|$)", line.strip()):
            found[name] = text.strip()
    return found


def run(main: Callable[[list[str]], int | None]) -> None:
    """`app.run` where an error of ours is one line on standard error and exit status 2."""

    def guarded(argv: list[str]) -> int | None:
        from trillion_infer.core.errors import TrillionInferError

        if len(argv) > 1:
            raise app.UsageError(f"arguments {argv[1:]} are not flags; every option is --name=value.")
        settle_platform()
        logging.getLogger("jax").setLevel(logging.WARNING)  # absl lets through what its modules tell each other
        try:
            return main(argv)
        except (TrillionInferError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except ModuleNotFoundError as error:
            print(f"error: {error.name} is not installed; {_installed_by(error)}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130

    app.run(guarded, flags_parser=_parse)


def _installed_by(error: ModuleNotFoundError) -> str:
    """Which extra of ours brings a missing package. Raises the error again where none does: then it is no choice."""
    for requirement in metadata.requires("trillion-infer") or ():
        name, _, extra = requirement.partition("; extra == ")
        if extra and error.name and re.split(r"[^\w-]", name)[0].replace("-", "_") == error.name.partition(".")[0]:
            return f"pip install 'trillion-infer[{extra.strip(chr(34))}]'."
    raise error


def _parse(argv: list[str]) -> list[str]:
    """Flags from the command line; a wrong one ends the program with one line and status 2."""
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        print(f"error: {error} (--help lists the flags)", file=sys.stderr)
        raise SystemExit(2) from None

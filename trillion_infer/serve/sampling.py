"""Sampling parameters of a request body."""

from typing import Any

from trillion_infer.core.errors import InvalidRequestError
from trillion_infer.core.sampling_params import SamplingParams, StructuredOutput
from trillion_infer.serve.errors import ApiError
from trillion_infer.serve.fields import Fields

SAMPLING = frozenset(
    "n temperature top_p top_k min_p seed stop stop_token_ids include_stop_str_in_output min_tokens max_tokens "
    "repetition_penalty presence_penalty frequency_penalty logit_bias bad_words ignore_eos skip_special_tokens".split()
)
GUIDED = frozenset("guided_json guided_regex guided_choice guided_grammar structured_outputs response_format".split())
COMMON = SAMPLING | GUIDED | frozenset("model stream stream_options cache_salt session_id return_token_ids".split())


def read_sampling(fields: Fields, limit: str = "max_tokens", **more: Any) -> SamplingParams:
    """The parameters that completions and chat share; `more` wins. Null means the default, and for max_tokens the
    end of the context. limit: the field that max_tokens came from, which errors name."""
    take = fields.take
    given = {
        "n": take("n", int),
        "temperature": take("temperature", float),
        "top_p": take("top_p", float),
        "top_k": take("top_k", int),
        "min_p": take("min_p", float),
        "seed": take("seed", int),
        "stop": take("stop", str, list),
        "stop_token_ids": take("stop_token_ids", list),
        "include_stop_str_in_output": take("include_stop_str_in_output", bool),
        "min_tokens": take("min_tokens", int),
        "repetition_penalty": take("repetition_penalty", float),
        "presence_penalty": take("presence_penalty", float),
        "frequency_penalty": take("frequency_penalty", float),
        "logit_bias": take("logit_bias", dict),
        "bad_words": take("bad_words", list),
        "ignore_eos": take("ignore_eos", bool),
        "skip_special_tokens": take("skip_special_tokens", bool),
    }
    given = {name: value for name, value in given.items() if value is not None}
    given["max_tokens"] = take("max_tokens", int)
    try:
        return SamplingParams(**{**given, **more})
    except InvalidRequestError as error:
        if error.param != "max_tokens":
            raise
        raise ApiError(400, str(error).replace("max_tokens", limit, 1), param=limit) from error
    except OverflowError as error:
        raise ApiError(400, f"a number is out of every range: {error}.") from error


def read_structure(fields: Fields) -> StructuredOutput | None:
    """What the text must follow, from response_format or one of the guided fields."""
    found = [spec for spec in (_response_format(fields), _guided(fields), _structured(fields)) if spec is not None]
    if len(found) > 1:
        raise ApiError(400, "response_format and guided fields are both given; give one.", param="response_format")
    return found[0] if found else None


def read_stream(fields: Fields) -> tuple[bool, bool]:
    """(answer as a stream, with a usage chunk at its end)."""
    stream = fields.take("stream", bool, default=False)
    options = fields.take("stream_options", dict)
    if options is None:
        return stream, False
    if not stream:
        raise ApiError(400, "stream_options is given without stream; set stream to true.", param="stream_options")
    inner = Fields(options, ("include_usage", "include_obfuscation"), "stream_options")
    return stream, inner.take("include_usage", bool, default=False)


def format_of(value: Any, where: str) -> StructuredOutput | None:
    """A response format object: text, json_object or json_schema (nested as chat has it, or flat)."""
    fields = Fields(value, ("type", "json_schema", "schema", "name", "strict", "description"), where)
    kind = fields.need("type", str)
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutput(json_object=True)
    if kind != "json_schema":
        raise ApiError(
            400, f"{where}.type is {kind!r}; it must be text, json_object or json_schema.", param=f"{where}.type"
        )
    nested = fields.take("json_schema", dict)
    if nested is not None:
        fields = Fields(nested, ("name", "schema", "strict", "description"), f"{where}.json_schema")
    return StructuredOutput(json_schema=fields.need("schema", dict))


def _response_format(fields: Fields) -> StructuredOutput | None:
    value = fields.take("response_format", dict)
    return None if value is None else format_of(value, "response_format")


def _guided(fields: Fields) -> StructuredOutput | None:
    given = {
        "json_schema": fields.take("guided_json", dict, str),
        "regex": fields.take("guided_regex", str),
        "choice": fields.take("guided_choice", list),
        "grammar": fields.take("guided_grammar", str),
    }
    given = {name: value for name, value in given.items() if value is not None}
    return StructuredOutput(**given) if given else None


def _structured(fields: Fields) -> StructuredOutput | None:
    value = fields.take("structured_outputs", dict)
    if value is None:
        return None
    inner = Fields(value, ("json", "regex", "choice", "grammar", "json_object"), "structured_outputs")
    given = {
        "json_schema": inner.take("json", dict, str),
        "regex": inner.take("regex", str),
        "choice": inner.take("choice", list),
        "grammar": inner.take("grammar", str),
        "json_object": inner.take("json_object", bool, default=False),
    }
    return StructuredOutput(**given)

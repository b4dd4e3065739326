"""JSON schemas of request bodies and answers, for the OpenAPI document."""

from typing import Any

from trillion_infer.core.sampling_params import INT32_MAX, MAX_LOGPROBS, MAX_SEED
from trillion_infer.generation.sessions import MAX_NAME

Schema = dict[str, Any]


def nullable(kind: str, **more: Any) -> Schema:
    """A field that may be null, which is the same as leaving it out."""
    return {"type": [kind, "null"], **more}


def listing(items: Schema, **more: Any) -> Schema:
    return nullable("array", items=items, **more)


def body(required: tuple[str, ...], *parts: dict[str, Schema], closed: bool = True) -> Schema:
    """An object with the fields of all `parts`."""
    fields = {name: schema for part in parts for name, schema in part.items()}
    return {"type": "object", "required": list(required), "properties": fields, "additionalProperties": not closed}


TOKEN: Schema = {"type": "integer", "minimum": 0, "maximum": INT32_MAX}
TEXT: Schema = {"type": "string", "minLength": 1}
FREE: Schema = nullable("object")

SAMPLING: dict[str, Schema] = {
    "n": nullable("integer", minimum=1, maximum=128),
    "temperature": nullable("number", minimum=0),
    "top_p": nullable("number", exclusiveMinimum=0, maximum=1),
    "top_k": nullable("integer", minimum=-1, maximum=INT32_MAX),
    "min_p": nullable("number", minimum=0, maximum=1),
    "seed": nullable("integer", minimum=-MAX_SEED, maximum=MAX_SEED),
    "stop": {"anyOf": [{"type": ["string", "null"], "minLength": 1}, listing(TEXT)]},
    "stop_token_ids": listing(TOKEN),
    "include_stop_str_in_output": nullable("boolean"),
    "min_tokens": nullable("integer", minimum=0, maximum=INT32_MAX),
    "max_tokens": nullable("integer", minimum=0, maximum=INT32_MAX),
    "repetition_penalty": nullable("number", exclusiveMinimum=0),
    "presence_penalty": nullable("number", minimum=-2, maximum=2),
    "frequency_penalty": nullable("number", minimum=-2, maximum=2),
    "logit_bias": nullable("object", additionalProperties={"type": "number", "minimum": -100, "maximum": 100}),
    "bad_words": listing(TEXT),
    "ignore_eos": nullable("boolean"),
    "skip_special_tokens": nullable("boolean"),
}

STRUCTURE: dict[str, Schema] = {
    "guided_json": nullable("object"),
    "guided_regex": nullable("string"),
    "guided_choice": listing(TEXT, minItems=1),
    "guided_grammar": nullable("string"),
    "structured_outputs": FREE,
    "response_format": nullable("object", properties={"type": {"enum": ["text", "json_object", "json_schema"]}}),
}
STRUCTURE["guided_json"] = {"type": ["object", "string", "null"]}

COMMON: dict[str, Schema] = {
    "model": {"type": "string"},
    "stream": nullable("boolean"),
    "stream_options": nullable(
        "object",
        properties={"include_usage": nullable("boolean"), "include_obfuscation": {}},
        additionalProperties=False,
    ),
    "cache_salt": nullable("string"),
    "session_id": nullable("string", minLength=1, maxLength=MAX_NAME),
    "return_token_ids": nullable("boolean"),
}

MESSAGES: Schema = {
    "type": "array",
    "items": {"type": "object", "required": ["role"], "properties": {"role": {"type": "string"}}},
}
TOOLS = listing({"type": "object", "required": ["type"], "properties": {"type": {"const": "function"}}})
TOOL_USE: dict[str, Schema] = {
    "tools": TOOLS,
    "tool_choice": {"type": ["string", "object", "null"]},
    "parallel_tool_calls": nullable("boolean"),
}
TEMPLATE: dict[str, Schema] = {
    "chat_template_kwargs": FREE,
    "add_generation_prompt": nullable("boolean"),
    "continue_final_message": nullable("boolean"),
}

COMPLETION = body(
    ("model", "prompt"),
    SAMPLING,
    STRUCTURE,
    COMMON,
    {
        "prompt": {"type": ["string", "array"]},
        "echo": nullable("boolean"),
        "logprobs": nullable("integer", minimum=0, maximum=MAX_LOGPROBS),
        "suffix": nullable("string", maxLength=0),
        "best_of": nullable("integer", minimum=1, maximum=128),
    },
)
CHAT = body(
    ("model", "messages"),
    SAMPLING,
    STRUCTURE,
    COMMON,
    TOOL_USE,
    TEMPLATE,
    {
        "messages": MESSAGES,
        "max_completion_tokens": SAMPLING["max_tokens"],
        "logprobs": nullable("boolean"),
        "top_logprobs": nullable("integer", minimum=0, maximum=MAX_LOGPROBS),
        "reasoning_effort": nullable("string"),
    },
)
RESPONSES = body(
    ("model", "input"),
    {name: SAMPLING[name] for name in ("temperature", "top_p", "top_k", "min_p", "seed", "stop")},
    {name: COMMON[name] for name in ("model", "stream", "stream_options", "cache_salt", "session_id")},
    TOOL_USE,
    {
        "input": {"type": ["string", "array"]},
        "instructions": nullable("string"),
        "max_output_tokens": SAMPLING["max_tokens"],
        "text": FREE,
        "reasoning": FREE,
        "truncation": {"enum": ["disabled", None]},
        "include": listing({"enum": ["message.output_text.logprobs", "reasoning.encrypted_content"]}),
        "top_logprobs": nullable("integer", minimum=0, maximum=MAX_LOGPROBS),
        "background": {"type": ["string", "boolean", "null"]},
        "previous_response_id": {"type": ["string", "boolean", "null"]},
    },
)
TOKENIZE: Schema = {
    "anyOf": [
        body(
            ("prompt",),
            {"model": nullable("string"), "prompt": {"type": "string"}, "add_special_tokens": nullable("boolean")},
        ),
        body(("messages",), {"model": nullable("string"), "messages": MESSAGES, "tools": TOOLS}, TEMPLATE),
    ]
}
DETOKENIZE = body(("tokens",), {"model": nullable("string"), "tokens": {"type": "array", "items": TOKEN}})
ROLE = body(("role",), {"role": {"enum": ["prefill", "decode", "both"]}})
ABORT = body(("request_id",), {"request_id": {"type": "string"}})

USAGE = body(
    ("prompt_tokens", "completion_tokens", "total_tokens"),
    {name: {"type": "integer", "minimum": 0} for name in ("prompt_tokens", "completion_tokens", "total_tokens")},
    closed=False,
)


def answer(kind: str, **fields: Schema) -> Schema:
    """An answer whose `object` is `kind`."""
    return body(("id", "object", *fields), {"id": TEXT, "object": {"const": kind}}, fields, closed=False)


CHOICES: Schema = {"type": "array", "minItems": 1, "items": {"type": "object", "required": ["index", "finish_reason"]}}
COMPLETION_ANSWER = answer("text_completion", choices=CHOICES, usage=USAGE)
CHAT_ANSWER = answer("chat.completion", choices=CHOICES, usage=USAGE)
RESPONSE_ANSWER = answer("response", status={"enum": ["completed", "incomplete"]}, output={"type": "array"})
MODEL_CARD = answer("model", owned_by=TEXT, max_model_len=TOKEN)
MODEL_LIST = body(
    ("object", "data"), {"object": {"const": "list"}, "data": {"type": "array", "items": MODEL_CARD}}, closed=False
)
TOKENS = body(
    ("count", "tokens"), {"count": TOKEN, "tokens": {"type": "array", "items": TOKEN}, "max_model_len": TOKEN}
)
DETOKENIZED = body(("prompt",), {"prompt": {"type": "string"}})
ABORTED = body(("request_id", "aborted"), {"request_id": {"type": "string"}, "aborted": {"type": "boolean"}})
SESSION = answer(
    "session",
    num_tokens=TOKEN,
    is_live={"type": "boolean"},
    is_saved={"type": "boolean"},
    is_pinned={"type": "boolean"},
    idle_s=nullable("number", minimum=0),
)
SESSION_LIST = body(
    ("object", "data"), {"object": {"const": "list"}, "data": {"type": "array", "items": SESSION}}, closed=False
)
SESSION_DELETED = answer("session", deleted={"const": True})
CACHE_DELETED = body(("object", "deleted"), {"object": {"const": "cache"}, "deleted": {"const": True}})
HEALTHY = body(("status",), {"status": {"const": "ok"}}, closed=False)
HASHES: Schema = {"type": "array", "items": TEXT}
BLOCKS = body(
    ("epoch", "count", "reset", "stored", "removed"),
    {"epoch": TEXT, "count": {"type": "integer"}, "reset": {"type": "boolean"}, "stored": HASHES, "removed": HASHES},
)
STATUS = body(("model", "requests", "engine"), {"model": TEXT, "requests": TOKEN, "engine": FREE}, closed=False)
ERROR = body(
    ("error",),
    {
        "error": body(
            ("message", "type"),
            {"message": TEXT, "type": TEXT, "param": nullable("string"), "code": nullable("string")},
            closed=False,
        )
    },
    closed=False,
)

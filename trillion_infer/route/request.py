"""What the router reads of a request body: enough to place it, never to validate it. Workers validate."""

import dataclasses
from typing import Any

from trillion_infer.core.prompt_prefix import prompt_of

DEFAULT_OUTPUT_TOKENS = 256


@dataclasses.dataclass(frozen=True)
class RequestView:
    """A request as the router sees it.

    `prompt` holds the bytes whose prefixes are compared (tools first, then the messages or the prompt);
    `prompt_ids` is the number of token ids if the prompt came as ids; `max_output` counts tokens over all choices.
    `no_replay` says why a started stream cannot be generated again, or is None where it can.
    """

    path: str
    stream: bool
    prompt: bytes
    prompt_ids: int | None
    max_output: int | None
    no_replay: str | None


def view_request(path: str, body: dict[str, Any]) -> RequestView:
    """Reads `body` of a POST to `path`; odd types are read as absent, for the worker to refuse."""
    prompt, prompt_ids = prompt_of(body)
    return RequestView(
        path=path,
        stream=body.get("stream") is True,
        prompt=prompt,
        prompt_ids=prompt_ids,
        max_output=_max_output(body),
        no_replay=_no_replay(path, body),
    )


def _max_output(body: dict[str, Any]) -> int | None:
    limit = next(
        (body[name] for name in ("max_completion_tokens", "max_output_tokens", "max_tokens") if body.get(name)), None
    )
    copies = body.get("n")
    copies = copies if type(copies) is int and 0 < copies <= 1024 else 1
    return limit * copies if type(limit) is int and limit > 0 else None


def _no_replay(path: str, body: dict[str, Any]) -> str | None:
    if path not in ("/v1/completions", "/v1/chat/completions"):
        return f"streams of {path} are not replayed"
    if body.get("temperature") != 0 and type(body.get("seed")) is not int:
        return "it is sampled without a seed; set temperature 0 or a seed"
    if body.get("logprobs") or body.get("return_token_ids"):
        return "it asks for data of each token (logprobs or return_token_ids)"
    return None

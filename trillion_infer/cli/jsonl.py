"""Prompts from JSONL files and outputs to them."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trillion_infer.core.errors import InvalidRequestError
from trillion_infer.core.outputs import RequestOutput
from trillion_infer.core.sampling_params import SamplingParams

_PROMPTS = ("prompt", "prompt_token_ids", "messages")
_SAMPLING = {field.name for field in dataclasses.fields(SamplingParams)} - {"structured_output"}


def read_rows(path: str) -> Iterator[tuple[int, Any]]:
    """(index, parsed row or the InvalidRequestError that says what is wrong with it) of each line that is not blank."""
    index = 0
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield index, json.loads(line)
            except json.JSONDecodeError as error:
                yield index, InvalidRequestError(f"{path} line {number} is not JSON: {error}.")
            index += 1


def parse_row(
    row: Any, params: SamplingParams, render_chat: Callable[..., str]
) -> tuple[str | dict[str, Any], SamplingParams]:
    """The prompt of a row {"prompt" | "prompt_token_ids" | "messages"[, "tools"]}; SamplingParams' fields in it win.

    Raises InvalidRequestError for rows of another form; unknown keys are named.
    """
    if isinstance(row, InvalidRequestError):
        raise row
    if not isinstance(row, dict):
        raise InvalidRequestError(f"a row is {type(row).__name__}; it must be a JSON object.")
    given = [key for key in _PROMPTS if key in row]
    if len(given) != 1:
        raise InvalidRequestError(f"a row has {given or 'no prompt'}; give exactly one of {', '.join(_PROMPTS)}.")
    unknown = set(row) - {given[0], "tools"} - _SAMPLING
    if unknown or ("tools" in row and given[0] != "messages"):
        raise InvalidRequestError(f"a row has keys that are not known here: {', '.join(sorted(unknown or {'tools'}))}.")
    params = dataclasses.replace(params, **{key: row[key] for key in row if key in _SAMPLING})
    if given[0] == "messages":
        return render_chat(row["messages"], tools=row.get("tools")), params
    if given[0] == "prompt" and not isinstance(row["prompt"], str):
        raise InvalidRequestError(f"prompt is {type(row['prompt']).__name__}; it must be a string.", param="prompt")
    if given[0] == "prompt_token_ids" and not isinstance(row["prompt_token_ids"], list):
        raise InvalidRequestError("prompt_token_ids must be a list of token ids.", param="prompt_token_ids")
    return {given[0]: row[given[0]]}, params


def output_row(index: int, output: RequestOutput) -> dict[str, Any]:
    """What generate.py writes of an answer; with n > 1 all answers under `outputs`."""
    first = output.outputs[0]
    row = {
        "index": index,
        "prompt_token_ids": output.prompt_token_ids,
        "token_ids": first.token_ids,
        "text": first.text,
        "finish_reason": first.finish_reason,
        "num_cached_tokens": output.num_cached_tokens,
    }
    if first.logprobs is not None:
        row["logprobs"] = [_logprobs(entry) for entry in first.logprobs]
    if output.prompt_logprobs is not None:
        row["prompt_logprobs"] = [entry and _logprobs(entry) for entry in output.prompt_logprobs]
    if len(output.outputs) > 1:
        row["outputs"] = [
            {"token_ids": o.token_ids, "text": o.text, "finish_reason": o.finish_reason} for o in output.outputs
        ]
    return row


def _logprobs(entry: dict[int, Any]) -> dict[str, Any]:
    """Finite numbers only, so that every line is valid JSON."""
    return {str(token): {"logprob": max(found.logprob, -1e9), "rank": found.rank} for token, found in entry.items()}

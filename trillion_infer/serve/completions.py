"""/v1/completions."""

import time
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from trillion_infer.core.outputs import CompletionOutput, RequestOutput
from trillion_infer.core.sampling_params import SamplingParams
from trillion_infer.generation.outputs import Delta
from trillion_infer.generation.prompts import Prompt
from trillion_infer.serve.errors import ApiError
from trillion_infer.serve.fields import Fields, JsonTemplate
from trillion_infer.serve.jobs import Job
from trillion_infer.serve.logprobs import Entry, completion_logprobs
from trillion_infer.serve.replies import finish_reason, json_reply
from trillion_infer.serve.sampling import COMMON, read_sampling, read_stream, read_structure
from trillion_infer.serve.server import Server, new_id
from trillion_infer.serve.sse import EventStream, until_disconnect

FIELDS = COMMON | {"prompt", "echo", "logprobs", "suffix", "best_of"}


@dataclass(frozen=True)
class CompletionRequest:
    """A body that was read. `only_prompt`: max_tokens was 0, the echoed prompt is all that is wanted."""

    prompts: list[Prompt]
    params: SamplingParams
    echo: bool
    stream: bool
    include_usage: bool
    salt: str
    return_ids: bool
    only_prompt: bool
    session_id: str | None


async def completions(http: HttpRequest) -> Response:
    """The endpoint."""
    server: Server = http.app.state.server
    request = read_completion(await server.body(http), server)
    job = await until_disconnect(
        http.receive,
        server.run(
            new_id("cmpl", http.state.request_id),
            request.prompts,
            request.params,
            http.state.caller,
            request.salt,
            request.session_id,
        ),
    )
    answer = _Answer(server, request, job)
    if request.stream:
        return EventStream(job, answer, lambda: server.close(job))
    try:
        await until_disconnect(http.receive, job.finish())
        return json_reply(answer.whole(), job.id)
    finally:
        server.close(job)


def read_completion(body: Any, server: Server) -> CompletionRequest:
    """Checks a body. Raises ApiError and InvalidRequestError."""
    fields = Fields(body, FIELDS)
    server.check_model(fields.need("model", str))
    echo, logprobs = fields.take("echo", bool, default=False), fields.take("logprobs", int)
    stream, include_usage = read_stream(fields)
    only_prompt = echo and not stream and fields.take("max_tokens", int) == 0
    more: dict[str, Any] = {"max_tokens": 1} if only_prompt else {}
    params = read_sampling(
        fields,
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
        structured_output=read_structure(fields),
        **more,
    )
    if fields.take("suffix", str):
        raise ApiError(400, "suffix is not supported; leave it out.", param="suffix")
    if fields.take("best_of", int, default=params.n) != params.n:
        raise ApiError(400, "best_of differs from n, which is not supported; leave it out.", param="best_of")
    return CompletionRequest(
        _prompts(fields.need("prompt", str, list)),
        params,
        echo,
        stream,
        include_usage,
        fields.take("cache_salt", str, default=""),
        fields.take("return_token_ids", bool, default=False),
        only_prompt,
        fields.take("session_id", str),
    )


def _prompts(value: Any) -> list[Prompt]:
    """The prompts of a text, token ids, or a list of either."""
    if isinstance(value, str):
        return [value]
    if not value:
        raise ApiError(400, "prompt is an empty list; give at least one prompt.", param="prompt")
    if all(isinstance(each, str | list) for each in value):
        return list(value)
    if not any(isinstance(each, str | list | dict) for each in value):
        return [value]
    raise ApiError(400, "prompt mixes forms; give a text, token ids, or a list of either.", param="prompt")


class _Answer:
    """Writes the outputs of a job as OpenAI does."""

    def __init__(self, server: Server, request: CompletionRequest, job: Job):
        self._server, self._request, self._job = server, request, job
        self._head = {
            "id": job.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": server.options.model_name,
        }
        self._lengths: dict[int, int] = {}  # by choice: characters of its tokens with log-probabilities so far
        self._templates: dict[int, JsonTemplate] = {}

    def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        outputs = [self._job.outputs[number] for number in range(len(self._job.states))]
        n = self._request.params.n
        choices = [
            self._choice(number * n + each.index, output, each)
            for number, output in enumerate(outputs)
            for each in output.outputs
        ]
        usage = self._job.usage()
        if self._request.only_prompt:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return {**self._head, "choices": choices, "usage": usage, "max_tokens": self._job.max_tokens}

    def _choice(self, index: int, output: RequestOutput, each: CompletionOutput) -> dict[str, Any]:
        request = self._request
        if request.only_prompt:
            each = replace(each, text="", token_ids=[], logprobs=each.logprobs and [], finish_reason="length")
        ids, text = list(each.token_ids), each.text
        entries: list[Entry | None] = list(each.logprobs or ())
        if request.echo:
            text = self._prompt_text(output.prompt, output.prompt_token_ids) + text
            ids = [*output.prompt_token_ids, *ids]
            entries = [*(output.prompt_logprobs or ()), *entries]
        reason = finish_reason(each.finish_reason)
        choice = _choice(index, text, self._logprobs(ids, entries), reason, each.stop_reason)
        if request.return_ids:
            choice |= {"token_ids": each.token_ids, "prompt_token_ids": output.prompt_token_ids}
        return choice

    def _logprobs(self, ids: list[int], entries: list[Entry | None], offset: int = 0) -> dict[str, Any] | None:
        count = self._request.params.logprobs
        if count is None:
            return None
        found = completion_logprobs(ids, entries, count, offset)
        if self._request.echo and ids and entries[0] is None:
            found["tokens"][0] = self._server.tokenizer.decode(ids[:1], skip_special_tokens=False)
        return found

    def _prompt_text(self, text: str | None, ids: list[int]) -> str:
        return text if text is not None else self._server.tokenizer.decode(ids)

    def begin(self) -> list[Any]:
        """Nothing: chunks begin with text."""
        return []

    def add(self, number: int, delta: Delta) -> list[Any]:
        """The chunk of a delta, if it brings anything."""
        index = number * self._request.params.n + delta.index
        request = self._request
        plain = not (request.echo or request.return_ids) and request.params.logprobs is None
        if not plain or delta.finish_reason is not None:
            choice = self._delta(number, index, delta)
            return [] if choice is None else [self._chunk(choice)]
        if not delta.text:
            return []
        if index not in self._templates:
            self._templates[index] = JsonTemplate(self._chunk(_choice(index, JsonTemplate.HOLE)))
        return [self._templates[index].fill(delta.text)]

    def end(self) -> list[Any]:
        """The usage chunk, if it was asked for."""
        if not self._request.include_usage:
            return []
        return [{**self._head, "choices": [], "usage": self._job.usage(), "max_tokens": self._job.max_tokens}]

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        usage = {"usage": None} if self._request.include_usage else {}
        return {**self._head, "choices": [choice], **usage}

    def _delta(self, number: int, index: int, delta: Delta) -> dict[str, Any] | None:
        request, first = self._request, index not in self._lengths
        text, ids = delta.text, list(delta.token_ids)
        entries: list[Entry | None] = list(delta.logprobs or ())
        if request.echo and first:
            state = self._job.states[number]
            prompt_ids = state.texts[0].request.prompt_ids
            text, ids = self._prompt_text(state.prompt, prompt_ids) + text, [*prompt_ids, *ids]
            entries = [*(state.prompt_logprobs or ()), *entries]
        offset = self._lengths.setdefault(index, 0)
        if not text and delta.finish_reason is None and not (entries or request.return_ids):
            return None
        logprobs = self._logprobs(ids, entries, offset) if ids else None
        if logprobs:
            self._lengths[index] = logprobs["text_offset"][-1] + len(logprobs["tokens"][-1])
        choice = _choice(index, text, logprobs, finish_reason(delta.finish_reason), delta.stop_reason)
        return {**choice, "token_ids": delta.token_ids} if request.return_ids else choice


def _choice(
    index: int,
    text: str,
    logprobs: dict[str, Any] | None = None,
    reason: str | None = None,
    stop_reason: int | str | None = None,
) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": reason,
        "stop_reason": stop_reason,
    }

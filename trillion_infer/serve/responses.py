"""/v1/responses: text and tools. Nothing is kept between requests."""

import itertools
import time
import uuid
from dataclasses import replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from trillion_infer.generation.outputs import Delta
from trillion_infer.serve.chat import ChatRequest, run_chat
from trillion_infer.serve.chat_answer import ChatAnswer
from trillion_infer.serve.chat_reader import ChoiceReader
from trillion_infer.serve.jobs import Job
from trillion_infer.serve.logprobs import chat_logprobs
from trillion_infer.serve.replies import json_reply
from trillion_infer.serve.response_input import read_response_request
from trillion_infer.serve.response_items import ResponseItems
from trillion_infer.serve.server import Server, new_id
from trillion_infer.serve.sse import EventStream, until_disconnect


async def responses(http: HttpRequest) -> Response:
    """The endpoint."""
    server: Server = http.app.state.server
    body = await server.body(http)
    request = read_response_request(body, server)
    job_id = new_id("resp", http.state.request_id)
    job, in_reasoning = await until_disconnect(http.receive, run_chat(server, request, job_id, http.state.caller))
    answer = _Answer(server, request, body, job, ChatAnswer(server, request, job, in_reasoning).reader())
    if request.stream:
        return EventStream(job, answer, lambda: server.close(job), named=True)
    try:
        await until_disconnect(http.receive, job.finish())
        return json_reply(answer.whole(), job.id)
    finally:
        server.close(job)


class _Answer:
    """Writes a job as a response object, whole or by events."""

    def __init__(self, server: Server, request: ChatRequest, body: dict[str, Any], job: Job, reader: ChoiceReader):
        self._server, self._request, self._body, self._job, self._reader = server, request, body, job, reader
        self._model, self._created = server.options.model_name, int(time.time())
        self._numbers = itertools.count()
        self._items = ResponseItems(lambda prefix: f"{prefix}_{uuid.uuid4().hex}")

    def whole(self) -> dict[str, Any]:
        """The response of a finished job."""
        each = self._job.outputs[0].outputs[0]
        delta = Delta(self._job.id, 0, each.text, each.token_ids, None, each.finish_reason, each.stop_reason)
        self._read(replace(delta, logprobs=each.logprobs))
        self._items.close(each.finish_reason != "length")
        return self._response()

    def begin(self) -> list[Any]:
        """The response as it begins."""
        response = self._response()
        return self._numbered(
            [{"type": kind, "response": response} for kind in ("response.created", "response.in_progress")]
        )

    def add(self, number: int, delta: Delta) -> list[Any]:
        """The events of a delta."""
        events = self._read(delta)
        if delta.finish_reason is not None:
            events += self._items.close(delta.finish_reason != "length")
        return self._numbered(events)

    def end(self) -> list[Any]:
        """The whole response."""
        response = self._response()
        return self._numbered([{"type": f"response.{response['status']}", "response": response}])

    def _read(self, delta: Delta) -> list[dict[str, Any]]:
        """The events of a delta; by its tokens where each has log-probabilities."""
        count = self._request.params.logprobs
        if count is None or not delta.logprobs:
            return self._items.push(self._reader.push(delta))
        events, last = [], len(delta.token_ids) - 1
        scores = chat_logprobs(delta.token_ids, delta.logprobs, count, self._server.tokenizer)
        for i, (token, score) in enumerate(zip(delta.token_ids, scores, strict=True)):
            rest = {} if i == last else {"text": "", "finish_reason": None}
            thought = self._reader.reasoning_tokens
            read = self._reader.push(replace(delta, token_ids=[token], **rest))
            events += self._items.push(read, [score] if self._reader.reasoning_tokens == thought else [])
        return events

    def _numbered(self, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**event, "sequence_number": next(self._numbers)} for event in events]

    def _response(self) -> dict[str, Any]:
        output, body = self._job.outputs.get(0), self._body
        status, usage = "in_progress", None
        if output is not None:
            status = "incomplete" if output.outputs[0].finish_reason == "length" else "completed"
            counts = self._job.usage()
            usage = {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": counts["prompt_tokens_details"],
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self._reader.reasoning_tokens},
                "total_tokens": counts["total_tokens"],
            }
        return {
            "id": self._job.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "metadata": body.get("metadata") or {},
            "model": self._model,
            "output": self._items.items if output is not None else [],
            "parallel_tool_calls": self._request.tools.parallel,
            "previous_response_id": None,
            "temperature": self._request.params.temperature,
            "text": body.get("text") or {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "top_logprobs": self._request.params.logprobs or 0,
            "top_p": self._request.params.top_p,
            "truncation": "disabled",
            "usage": usage,
        }

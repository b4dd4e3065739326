"""/v1/responses: text and tools. Nothing is kept between requests."""

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from trillion_infer.generation.outputs import Delta
from trillion_infer.serve.chat import ChatRequest, run_chat
from trillion_infer.serve.chat_answer import ChatAnswer
from trillion_infer.serve.chat_reader import ChoiceReader
from trillion_infer.serve.jobs import Job
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
        return EventStream(answer.events(), lambda: server.close(job), {"X-Request-Id": job.id}, named=True)
    try:
        await until_disconnect(http.receive, job.finish())
        return json_reply(answer.whole(), job.id)
    finally:
        server.close(job)


class _Answer:
    """Writes a job as a response object, whole or by events."""

    def __init__(self, server: Server, request: ChatRequest, body: dict[str, Any], job: Job, reader: ChoiceReader):
        self._request, self._body, self._job, self._reader = request, body, job, reader
        self._model, self._created = server.options.model_name, int(time.time())
        self._items = ResponseItems(lambda prefix: f"{prefix}_{uuid.uuid4().hex}")

    def whole(self) -> dict[str, Any]:
        """The response of a finished job."""
        each = self._job.outputs[0].outputs[0]
        delta = Delta(self._job.id, 0, each.text, each.token_ids, None, each.finish_reason, each.stop_reason)
        self._items.push(self._reader.push(delta))
        self._items.close(each.finish_reason != "length")
        return self._response()

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The events of a streamed response, numbered."""
        number = 0
        async for event in self._unnumbered():
            yield {**event, "sequence_number": number}
            number += 1

    async def _unnumbered(self) -> AsyncIterator[dict[str, Any]]:
        yield {"type": "response.created", "response": self._response()}
        yield {"type": "response.in_progress", "response": self._response()}
        async for _, delta in self._job.deltas():
            for event in self._items.push(self._reader.push(delta)):
                yield event
            if delta.finish_reason is not None:
                for event in self._items.close(delta.finish_reason != "length"):
                    yield event
        response = self._response()
        yield {"type": f"response.{response['status']}", "response": response}

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
                "output_tokens_details": {"reasoning_tokens": 0},
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
            "top_p": self._request.params.top_p,
            "truncation": "disabled",
            "usage": usage,
        }

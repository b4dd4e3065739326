"""Answers of /v1/chat/completions, whole and as chunks."""

from __future__ import annotations

import time
from functools import cached_property
from typing import TYPE_CHECKING, Any

from trillion_infer.core.outputs import CompletionOutput
from trillion_infer.generation.outputs import Delta
from trillion_infer.serve.chat_reader import ChoiceReader
from trillion_infer.serve.fields import JsonTemplate
from trillion_infer.serve.jobs import Job
from trillion_infer.serve.logprobs import Entry, chat_logprobs
from trillion_infer.serve.replies import finish_reason
from trillion_infer.serve.server import Server
from trillion_infer.text.tools import (
    ArgumentsDelta,
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCall,
    ToolCallStart,
    assemble,
)

if TYPE_CHECKING:
    from trillion_infer.serve.chat import ChatRequest


class ChatAnswer:
    """Writes the job of a conversation as OpenAI does."""

    def __init__(self, server: Server, request: ChatRequest, job: Job, in_reasoning: bool):
        self._server, self._request, self._job, self._in_reasoning = server, request, job, in_reasoning
        self._head = {"id": job.id, "created": int(time.time()), "model": server.options.model_name}
        self._templates: dict[int, JsonTemplate] = {}

    def reader(self) -> ChoiceReader:
        """A reader for one completion."""
        params = self._request.params
        return ChoiceReader(
            self._server,
            self._request.tools,
            in_reasoning=self._in_reasoning,
            calls_before=self._request.calls_before,
            stop=tuple(params.stop or ()),
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        output = self._job.outputs[0]
        choices = [self._choice(each, output.prompt_token_ids) for each in output.outputs]
        return {**self._head, "object": "chat.completion", "choices": choices, **self._usage()}

    def _usage(self) -> dict[str, Any]:
        """Token counts of what was read, and the limit that was in force."""
        usage = self._job.usage()
        if self._server.reasoning is not None:
            thought = sum(reader.reasoning_tokens for reader in self._readers)
            usage["completion_tokens_details"] = {"reasoning_tokens": thought}
        return {"usage": usage, "max_tokens": self._job.max_tokens}

    def _choice(self, each: CompletionOutput, prompt_ids: list[int]) -> dict[str, Any]:
        reader = self._readers[each.index]
        delta = Delta(self._job.id, each.index, each.text, each.token_ids, None, each.finish_reason, each.stop_reason)
        message = assemble(reader.push(delta))
        written: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
        if message.reasoning:
            written["reasoning_content"] = message.reasoning
        if message.tool_calls:
            written["content"] = message.content or None
            written["tool_calls"] = [_call(call) for call in message.tool_calls]
        choice = {
            "index": each.index,
            "message": written,
            "logprobs": self._logprobs(each.token_ids, each.logprobs),
            "finish_reason": finish_reason(each.finish_reason, reader.has_calls),
            "stop_reason": each.stop_reason,
        }
        if self._request.return_ids:
            choice |= {"token_ids": each.token_ids, "prompt_token_ids": prompt_ids}
        return choice

    def _logprobs(self, ids: list[int], entries: list[dict] | list[Entry] | None) -> dict[str, Any] | None:
        count = self._request.params.logprobs
        if count is None:
            return None
        return {"content": chat_logprobs(ids, entries or [], count, self._server.tokenizer), "refusal": None}

    def begin(self) -> list[Any]:
        """The first chunk of each choice."""
        return [self._chunk(index, {"role": "assistant", "content": ""}) for index in range(self._request.params.n)]

    def add(self, number: int, delta: Delta) -> list[Any]:
        """The chunks of a delta."""
        reader = self._readers[delta.index]
        events = reader.push(delta)
        logprobs = self._logprobs(delta.token_ids, delta.logprobs) if delta.token_ids else None
        ids: dict[str, Any] = {"token_ids": delta.token_ids} if self._request.return_ids else {}
        chunks: list[Any] = []
        for event in events:
            if isinstance(event, ContentDelta) and logprobs is None and not ids:
                chunks.append(self._template(delta.index).fill(event.text))
            elif (part := _part(event)) is not None:
                chunks.append(self._chunk(delta.index, part, logprobs=logprobs, **ids))
                logprobs, ids = None, {}
        if not chunks and (logprobs is not None or ids):
            chunks = [self._chunk(delta.index, {"content": ""}, logprobs=logprobs, **ids)]
        if delta.finish_reason is not None:
            reason = finish_reason(delta.finish_reason, reader.has_calls)
            chunks.append(self._chunk(delta.index, {}, reason, stop_reason=delta.stop_reason))
        return chunks

    def end(self) -> list[Any]:
        """The usage chunk, if it was asked for."""
        if not self._request.include_usage:
            return []
        return [{**self._head, "object": "chat.completion.chunk", "choices": [], **self._usage()}]

    @cached_property
    def _readers(self) -> list[ChoiceReader]:
        return [self.reader() for _ in range(self._request.params.n)]

    def _template(self, index: int) -> JsonTemplate:
        """The chunk of choice `index` that brings text alone."""
        if index not in self._templates:
            self._templates[index] = JsonTemplate(self._chunk(index, {"content": JsonTemplate.HOLE}))
        return self._templates[index]

    def _chunk(self, index: int, part: dict[str, Any], reason: str | None = None, **more: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": part, "logprobs": None, "finish_reason": reason, **more}
        usage = {"usage": None} if self._request.include_usage else {}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice], **usage}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _part(event: Event) -> dict[str, Any] | None:
    """The event as a chunk's delta; None for the end of a call, which has none."""
    match event:
        case ReasoningDelta(text):
            return {"reasoning_content": text}
        case ContentDelta(text):
            return {"content": text}
        case ToolCallStart(index, id, name):
            start = {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": ""}}
            return {"tool_calls": [start]}
        case ArgumentsDelta(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
    return None

"""/v1/chat/completions."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from trillion_infer.core.sampling_params import SamplingParams
from trillion_infer.serve.chat_answer import ChatAnswer
from trillion_infer.serve.errors import ApiError
from trillion_infer.serve.fields import Fields
from trillion_infer.serve.jobs import Caller, Job
from trillion_infer.serve.replies import json_reply
from trillion_infer.serve.sampling import COMMON, read_sampling, read_stream, read_structure
from trillion_infer.serve.server import Server, new_id
from trillion_infer.serve.sse import EventStream, until_disconnect
from trillion_infer.serve.tool_choice import ToolUse, message_structure, read_tools
from trillion_infer.text.tools import opens_reasoning

FIELDS = COMMON | frozenset(
    "messages max_completion_tokens logprobs top_logprobs tools tool_choice parallel_tool_calls reasoning_effort "
    "chat_template_kwargs add_generation_prompt continue_final_message".split()
)
_RENDER = frozenset("messages tools add_generation_prompt continue_final_message".split())


@dataclass(frozen=True)
class ChatRequest:
    """A conversation to answer. `template`: further variables of the chat template."""

    messages: list[Any]
    params: SamplingParams
    tools: ToolUse
    template: Mapping[str, Any]
    stream: bool = False
    include_usage: bool = False
    salt: str = ""
    return_ids: bool = False
    session_id: str | None = None

    @property
    def calls_before(self) -> int:
        """Calls made earlier in the conversation."""
        return sum(
            len(message.get("tool_calls") or ())
            for message in self.messages
            if isinstance(message, dict) and isinstance(message.get("tool_calls"), list)
        )


async def chat_completions(http: HttpRequest) -> Response:
    """The endpoint."""
    server: Server = http.app.state.server
    request = read_chat(await server.body(http), server)
    job_id = new_id("chatcmpl", http.state.request_id)
    job, in_reasoning = await until_disconnect(http.receive, run_chat(server, request, job_id, http.state.caller))
    answer = ChatAnswer(server, request, job, in_reasoning)
    if request.stream:
        return EventStream(job, answer, lambda: server.close(job))
    try:
        await until_disconnect(http.receive, job.finish())
        return json_reply(answer.whole(), job.id)
    finally:
        server.close(job)


async def run_chat(server: Server, request: ChatRequest, job_id: str, caller: Caller) -> tuple[Job, bool]:
    """The job of a conversation, and whether its prompt opens the reasoning."""

    def render() -> tuple[str, bool, SamplingParams]:
        prompt = server.template.render(request.messages, tools=request.tools.offered or None, **dict(request.template))
        opened = opens_reasoning(prompt[-64:], server.reasoning)
        structure = message_structure(server, request.tools, request.params.structured_output, opened)
        return prompt, opened, replace(request.params, structured_output=structure)

    prompt, opened, params = await server.prepared(render)
    return await server.run(job_id, [prompt], params, caller, request.salt, request.session_id), opened


def read_chat(body: Any, server: Server) -> ChatRequest:
    """Checks a body. Raises ApiError and InvalidRequestError."""
    fields = Fields(body, FIELDS)
    server.check_model(fields.need("model", str))
    stream, include_usage = read_stream(fields)
    params = read_sampling(
        fields,
        "max_completion_tokens" if fields.given("max_completion_tokens") else "max_tokens",
        max_tokens=_max_tokens(fields),
        logprobs=_logprobs(fields),
        structured_output=read_structure(fields),
    )
    return ChatRequest(
        fields.need("messages", list),
        params,
        read_tools(
            fields.take("tools", list),
            fields.take("tool_choice", str, dict),
            fields.take("parallel_tool_calls", bool, default=True),
        ),
        template_variables(fields),
        stream,
        include_usage,
        fields.take("cache_salt", str, default=""),
        fields.take("return_token_ids", bool, default=False),
        fields.take("session_id", str),
    )


def _max_tokens(fields: Fields) -> int | None:
    old, new = fields.take("max_tokens", int), fields.take("max_completion_tokens", int)
    if old is not None and new is not None and old != new:
        raise ApiError(
            400, f"max_tokens is {old} and max_completion_tokens is {new}; give one.", param="max_completion_tokens"
        )
    return new if old is None else old


def _logprobs(fields: Fields) -> int | None:
    wanted, count = fields.take("logprobs", bool, default=False), fields.take("top_logprobs", int)
    if count and not wanted:
        raise ApiError(400, "top_logprobs is given without logprobs; set logprobs to true.", param="top_logprobs")
    return (count or 0) if wanted else None


def template_variables(fields: Fields) -> dict[str, Any]:
    """What a body gives the chat template besides messages and tools."""
    given = dict(fields.take("chat_template_kwargs", dict, default={}))
    taken = sorted(_RENDER & set(given))
    if taken:
        raise ApiError(400, f"chat_template_kwargs sets {taken[0]}; use the field of that name.", param=taken[0])
    effort = fields.take("reasoning_effort", str)
    flags = {
        "add_generation_prompt": fields.take("add_generation_prompt", bool, default=True),
        "continue_final_message": fields.take("continue_final_message", bool, default=False),
    }
    return {**given, **flags, **({"reasoning_effort": effort} if effort else {})}

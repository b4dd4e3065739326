"""Endpoints around the model: health, figures, models, tokens, abort."""

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from trillion_infer.serve.chat import template_variables
from trillion_infer.serve.errors import ApiError
from trillion_infer.serve.fields import Fields
from trillion_infer.serve.pool import worker_state
from trillion_infer.serve.replies import error_reply, json_reply
from trillion_infer.serve.server import Server
from trillion_infer.serve.tool_choice import read_tools


async def health(http: HttpRequest) -> Response:
    """200 while the engine loop turns, else 503."""
    server: Server = http.app.state.server
    trouble = server.health()
    if trouble is None:
        return json_reply({"status": "ok", "blocks": True, **await worker_state(server)})
    return error_reply(ApiError(503, trouble, code="unhealthy", retry_after=server.options.retry_after_s))


async def blocks(http: HttpRequest) -> Response:
    """What changed in the prefix cache after event ?count=N of ?epoch=E, for routers."""
    server: Server = http.app.state.server
    epoch, count = http.query_params.get("epoch", ""), http.query_params.get("count", "0")
    if not (count.isascii() and count.isdigit() and len(count) < 20):
        raise ApiError(400, f"count is {count!r}; it must be the number of an event.", param="count")
    return json_reply(await server.thread.call(lambda: server.blocks.since(epoch, int(count))))


async def metrics(http: HttpRequest) -> Response:
    """Prometheus' text format."""
    server: Server = http.app.state.server
    return Response(server.metrics.text(await server.stats()), media_type="text/plain; version=0.0.4; charset=utf-8")


async def models(http: HttpRequest) -> Response:
    server: Server = http.app.state.server
    return json_reply({"object": "list", "data": [_card(server)]})


async def model(http: HttpRequest) -> Response:
    server: Server = http.app.state.server
    server.check_model(http.path_params["name"])
    return json_reply(_card(server))


def _card(server: Server) -> dict[str, Any]:
    return {
        "id": server.options.model_name,
        "object": "model",
        "created": 0,
        "owned_by": "trillion_infer",
        "max_model_len": server.reader.max_model_len,
    }


async def tokenize(http: HttpRequest) -> Response:
    """Token ids of a prompt or of a rendered conversation."""
    server: Server = http.app.state.server
    body = await server.body(http)
    if isinstance(body, dict) and "messages" in body:
        known = (
            "model",
            "messages",
            "tools",
            "add_generation_prompt",
            "continue_final_message",
            "chat_template_kwargs",
        )
        fields = _checked(server, Fields(body, known))
        messages = fields.need("messages", list)
        tools = read_tools(fields.take("tools", list), None, True).offered or None
        variables = template_variables(fields)
        ids = await server.prepared(
            lambda: server.tokenizer.encode(server.template.render(messages, tools=tools, **variables))
        )
    else:
        fields = _checked(server, Fields(body, ("model", "prompt", "add_special_tokens")))
        text, special = fields.need("prompt", str), fields.take("add_special_tokens", bool, default=True)
        ids = await server.prepared(lambda: server.tokenizer.encode(text, add_special_tokens=special))
    return json_reply({"count": len(ids), "max_model_len": server.reader.max_model_len, "tokens": ids})


def _checked(server: Server, fields: Fields) -> Fields:
    """The fields, whose model, if they name one, is that of this server."""
    if (model := fields.take("model", str)) is not None:
        server.check_model(model)
    return fields


async def detokenize(http: HttpRequest) -> Response:
    """The text of token ids."""
    server: Server = http.app.state.server
    ids = _checked(server, Fields(await server.body(http), ("model", "tokens"))).need("tokens", list)
    checked = [] if not ids else server.reader.read(ids)[1]
    return json_reply({"prompt": server.tokenizer.decode(checked, skip_special_tokens=False)})


async def abort(http: HttpRequest) -> Response:
    """Ends a request by the id of its answer; unknown ids change nothing."""
    server: Server = http.app.state.server
    job_id = Fields(await server.body(http), ("request_id",)).need("request_id", str)
    return json_reply({"request_id": job_id, "aborted": server.abort(job_id, http.state.tenant)})

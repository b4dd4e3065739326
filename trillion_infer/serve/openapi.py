"""The OpenAPI document of the server: what every endpoint takes and answers."""

from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from trillion_infer.serve import schemas
from trillion_infer.serve.fields import IGNORED
from trillion_infer.serve.replies import json_reply

JSON, EVENTS = "application/json", "text/event-stream"


@dataclass(frozen=True)
class Endpoint:
    """A path and method. `errors`: statuses besides 200 that it can answer with; `streams`: `stream` is a field."""

    path: str
    method: str
    summary: str
    answer: schemas.Schema | None
    body: schemas.Schema | None = None
    errors: tuple[int, ...] = ()
    media: str = JSON
    streams: bool = False
    guarded: bool = True
    query: tuple[tuple[str, schemas.Schema], ...] = ()

    def operation(self) -> dict[str, Any]:
        content: dict[str, Any] = {self.media: {} if self.answer is None else {"schema": self.answer}}
        if self.streams:
            content[EVENTS] = {"schema": {"type": "string"}}
        statuses = (*self.errors, *((401,) if self.guarded else ()), *((408, 413) if self.body else ()))
        responses: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
        for status in sorted(statuses):
            responses[str(status)] = {"$ref": f"#/components/responses/{status}"}
        found: dict[str, Any] = {"summary": self.summary, "operationId": self.operation_id, "responses": responses}
        if self.body is not None:
            found["requestBody"] = {"required": True, "content": {JSON: {"schema": self.body}}}
        if "{" in self.path:
            name = self.path[self.path.index("{") + 1 : self.path.index("}")]
            found["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schemas.TEXT}]
        if self.query:
            found["parameters"] = [{"name": name, "in": "query", "schema": schema} for name, schema in self.query]
        if not self.guarded:
            found["security"] = []
        return found

    @property
    def operation_id(self) -> str:
        return f"{self.method} {self.path}".replace("/", " ").replace("{", "").replace("}", "").title().replace(" ", "")


_BY_NAME = (400, 404, 503)
_BUSY = (400, 404, 429, 500, 503)
_IGNORED: dict[str, schemas.Schema] = {name: {"description": "Taken and ignored."} for name in sorted(IGNORED)}


def _open(schema: schemas.Schema) -> schemas.Schema:
    """A body with the fields that clients send and that change nothing."""
    if "anyOf" in schema:
        return {"anyOf": [_open(each) for each in schema["anyOf"]]}
    return {**schema, "properties": {**_IGNORED, **schema["properties"]}}


ENDPOINTS = (
    Endpoint(
        "/v1/completions",
        "post",
        "Continues texts or token ids.",
        schemas.COMPLETION_ANSWER,
        _open(schemas.COMPLETION),
        _BUSY,
        streams=True,
    ),
    Endpoint(
        "/v1/chat/completions",
        "post",
        "Answers a conversation.",
        schemas.CHAT_ANSWER,
        _open(schemas.CHAT),
        _BUSY,
        streams=True,
    ),
    Endpoint(
        "/v1/responses",
        "post",
        "Answers a conversation, as items.",
        schemas.RESPONSE_ANSWER,
        _open(schemas.RESPONSES),
        _BUSY,
        streams=True,
    ),
    Endpoint("/v1/models", "get", "The model that is served.", schemas.MODEL_LIST),
    Endpoint("/v1/models/{name}", "get", "One model.", schemas.MODEL_CARD, errors=(404,)),
    Endpoint(
        "/tokenize", "post", "Token ids of a prompt or conversation.", schemas.TOKENS, _open(schemas.TOKENIZE), (400,)
    ),
    Endpoint("/detokenize", "post", "The text of token ids.", schemas.DETOKENIZED, _open(schemas.DETOKENIZE), (400,)),
    Endpoint("/abort", "post", "Ends a request by its id.", schemas.ABORTED, _open(schemas.ABORT), (400,)),
    Endpoint("/v1/sessions", "get", "The caller's sessions, live and saved.", schemas.SESSION_LIST, errors=(503,)),
    Endpoint("/v1/sessions/{name}/save", "post", "Saves a live session.", schemas.SESSION, errors=_BY_NAME),
    Endpoint("/v1/sessions/{name}/load", "post", "Brings a saved session back.", schemas.SESSION, errors=_BY_NAME),
    Endpoint(
        "/v1/sessions/{name}",
        "delete",
        "Forgets a session and its blocks in every tier.",
        schemas.SESSION_DELETED,
        errors=_BY_NAME,
    ),
    Endpoint(
        "/v1/cache", "delete", "Deletes all that the caller's key left.", schemas.CACHE_DELETED, errors=(400, 503)
    ),
    Endpoint("/admin/role", "get", "The state of a worker of a pool.", {"type": "object"}, errors=(404,)),
    Endpoint(
        "/admin/role",
        "post",
        "Drains a worker and changes its role.",
        {"type": "object"},
        _open(schemas.ROLE),
        (400, 404),
    ),
    Endpoint("/admin/timeline", "get", "The newest spans of a worker.", {"type": "object"}, errors=(404,)),
    Endpoint("/health", "get", "Whether the engine loop turns.", schemas.HEALTHY, errors=(503,), guarded=False),
    Endpoint(
        "/blocks",
        "get",
        "What changed in the prefix cache, for routers.",
        schemas.BLOCKS,
        errors=(400, 500),
        guarded=False,
        query=(("epoch", {"type": "string"}), ("count", schemas.TOKEN)),
    ),
    Endpoint("/metrics", "get", "Figures for Prometheus.", None, media="text/plain", guarded=False),
    Endpoint("/status", "get", "Figures of the status page.", schemas.STATUS, guarded=False),
    Endpoint("/", "get", "The status page.", None, media="text/html", guarded=False),
    Endpoint("/openapi.json", "get", "This document.", {"type": "object"}, guarded=False),
)

_ERRORS = {
    400: "The request is not one that can be answered; the message says what was given and what is allowed.",
    401: "The API key is missing or wrong.",
    404: "No such model, path or session.",
    408: "The body did not arrive in time.",
    409: "In use.",
    413: "The body is too large.",
    429: "Too many requests; Retry-After says when to try again.",
    500: "The engine failed.",
    503: "The engine is not available; Retry-After says when to try again.",
}


def document() -> dict[str, Any]:
    """The whole document, OpenAPI 3.1."""
    paths: dict[str, Any] = {}
    for each in ENDPOINTS:
        paths.setdefault(each.path, {})[each.method] = each.operation()
    error = {"content": {JSON: {"schema": schemas.ERROR}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "trillion_infer", "version": version("trillion-infer")},
        "paths": paths,
        "components": {
            "responses": {str(status): {"description": text, **error} for status, text in _ERRORS.items()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


async def openapi(http: HttpRequest) -> Response:
    """The endpoint."""
    return json_reply(document())

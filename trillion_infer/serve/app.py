"""The starlette application."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from trillion_infer.core.errors import TrillionInferError
from trillion_infer.generation.generator import Generator
from trillion_infer.serve import admin, pool, sessions, status
from trillion_infer.serve.chat import chat_completions
from trillion_infer.serve.completions import completions
from trillion_infer.serve.errors import ApiError, as_api_error
from trillion_infer.serve.gate import Gate
from trillion_infer.serve.openapi import openapi
from trillion_infer.serve.options import ServerOptions
from trillion_infer.serve.replies import error_reply
from trillion_infer.serve.responses import responses
from trillion_infer.serve.server import Server
from trillion_infer.serve.sse import ClientGone

_ROUTES = [
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/responses", responses, methods=["POST"]),
    Route("/v1/models", admin.models),
    Route("/v1/models/{name:path}", admin.model),
    Route("/v1/sessions", sessions.list_sessions),
    Route("/v1/sessions/{name:path}/save", sessions.save_session, methods=["POST"]),
    Route("/v1/sessions/{name:path}/load", sessions.load_session, methods=["POST"]),
    Route("/v1/sessions/{name:path}", sessions.delete_session, methods=["DELETE"]),
    Route("/v1/cache", sessions.delete_cache, methods=["DELETE"]),
    Route("/tokenize", admin.tokenize, methods=["POST"]),
    Route("/detokenize", admin.detokenize, methods=["POST"]),
    Route("/abort", admin.abort, methods=["POST"]),
    Route("/health", admin.health),
    Route("/blocks", admin.blocks),
    Route("/metrics", admin.metrics),
    Route("/admin/role", pool.role, methods=["GET", "POST"]),
    Route("/admin/timeline", pool.timeline),
    Route("/status", status.status),
    Route("/openapi.json", openapi),
    Route("/", status.page),
]


def endpoints() -> set[tuple[str, str]]:
    """Path and method of every route, as the OpenAPI document writes them."""
    return {
        (route.path.replace(":path}", "}"), method)
        for route in _ROUTES
        for method in route.methods or ()
        if method != "HEAD"
    }


def create_app(generator: Generator, options: ServerOptions) -> Starlette:
    """The application; it starts the engine's thread, which owns `generator` from then on."""
    server = Server(generator, options)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        server.start()
        try:
            yield
        finally:
            server.stop()

    paths = frozenset(route.path for route in _ROUTES)
    app = Starlette(
        routes=_ROUTES,
        lifespan=lifespan,
        middleware=[Middleware(Gate, server=server, paths=paths)],  # pyright: ignore[reportArgumentType]
        exception_handlers={
            ApiError: _failed,
            TrillionInferError: _failed,
            HTTPException: _not_routed,
            ClientGone: _gone,
            RecursionError: _failed,
        },
    )
    app.state.server = server
    return app


async def _failed(http: HttpRequest, error: Exception) -> Response:
    return error_reply(as_api_error(error, http.app.state.server.options.retry_after_s))


async def _not_routed(http: HttpRequest, error: Any) -> Response:
    message = {
        404: f"there is no endpoint {http.url.path}.",
        405: f"{http.url.path} does not take {http.method}.",
    }.get(error.status_code, str(error.detail))
    answer = error_reply(ApiError(error.status_code, message))
    answer.headers.update(error.headers or {})
    return answer


async def _gone(http: HttpRequest, error: Exception) -> Response:
    return Response(status_code=499)

"""Sessions by name, and the blocks a tenant left: /v1/sessions and /v1/cache."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from trillion_infer.core.errors import ConfigError, EngineDeadError
from trillion_infer.generation.sessions import SessionInfo
from trillion_infer.serve.errors import ApiError
from trillion_infer.serve.replies import json_reply
from trillion_infer.serve.server import Server, cache_salt


async def list_sessions(http: HttpRequest) -> Response:
    """The caller's sessions, live and saved."""
    found = await _call(http, lambda server, salt: server.thread.generator.sessions.list(salt))
    return json_reply({"object": "list", "data": [_card(info) for info in found]})


async def save_session(http: HttpRequest) -> Response:
    """Saves a live session under its name."""
    name = http.path_params["name"]
    return json_reply(_card(await _call(http, lambda server, salt: server.thread.generator.sessions.save(name, salt))))


async def load_session(http: HttpRequest) -> Response:
    """Brings a saved session back."""
    name = http.path_params["name"]
    return json_reply(_card(await _call(http, lambda server, salt: server.thread.generator.sessions.load(name, salt))))


async def delete_session(http: HttpRequest) -> Response:
    """Forgets a session and its blocks in every tier."""
    name = http.path_params["name"]
    await _call(http, lambda server, salt: server.thread.generator.sessions.delete(name, salt))
    return json_reply({"id": name, "object": "session", "deleted": True})


async def delete_cache(http: HttpRequest) -> Response:
    """Deletes all that the caller's key left: sessions, their files, and blocks in every tier."""
    tenant = http.state.caller.tenant
    await _call(http, lambda server, _: server.thread.generator.sessions.delete_tenant(tenant))
    return json_reply({"object": "cache", "deleted": True})


async def _call(http: HttpRequest, function: Callable[[Server, str], Any]) -> Any:
    """The value of `function`, run between two steps of the engine."""
    server: Server = http.app.state.server
    salt = cache_salt(http.state.caller.tenant, http.query_params.get("cache_salt", ""))
    try:
        return await server.thread.call(lambda: function(server, salt))
    except ConfigError as error:
        raise ApiError(400, str(error), code="sessions_unavailable") from error
    except EngineDeadError as error:
        raise ApiError(503, str(error), code="unavailable", retry_after=server.options.retry_after_s) from error


def _card(info: SessionInfo) -> dict[str, Any]:
    fields = asdict(info)
    return {"id": fields.pop("name"), "object": "session", **fields}

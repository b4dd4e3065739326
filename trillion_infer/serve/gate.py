"""What stands before every endpoint: request ids, API keys, the access log."""

import logging
import re
import time
import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trillion_infer.serve.errors import as_api_error
from trillion_infer.serve.fields import dump_json
from trillion_infer.serve.jobs import Caller
from trillion_infer.serve.replies import error_reply
from trillion_infer.serve.server import Server

access_log = logging.getLogger("trillion_infer.access")
log = logging.getLogger("trillion_infer.serve")
_OPEN = ("/", "/blocks", "/health", "/metrics", "/openapi.json", "/status")
ADMIN = "/admin/"
"""Paths that have a key of their own."""
PEERS_HEADER = "x-prefill-workers"
_PEER = re.compile(r"[A-Za-z0-9._\-\[\]:]{1,255}:[0-9]{1,5}")
_GONE = 499
"""Stands for the status of an answer whose client left before it began."""
_ID = re.compile(r"[A-Za-z0-9._:\-]{1,100}")


class Gate:
    """ASGI middleware. Sets `tenant` and `request_id` in the request's state, and answers 401 itself."""

    def __init__(self, app: ASGIApp, server: Server, paths: frozenset[str]):
        self._app, self._server, self._paths = app, server, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, began, status = Headers(scope=scope), time.monotonic(), _GONE
        given = headers.get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                names = {name for name, _ in message.get("headers", ())}
                if b"x-request-id" not in names:
                    message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            state = scope.setdefault("state", {})
            state["request_id"], state["tenant"] = request_id, ""
            path = scope["path"]
            if path not in _OPEN and not path.startswith(ADMIN):
                state["tenant"] = self._server.keys.tenant(headers.get("authorization"))
            state["caller"] = Caller(state["tenant"], _peers(headers.get(PEERS_HEADER, "")))
            await self._app(scope, receive, sending)
        except Exception as error:
            answer = as_api_error(error)
            if answer.status >= 500:
                log.exception("request %s failed", request_id)
            if status == _GONE:
                await error_reply(answer)(scope, receive, sending)
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._server.metrics.answered(path, status)
            entry = {
                "request_id": request_id,
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "seconds": round(time.monotonic() - began, 4),
                "tenant": state["tenant"][:8],
            }
            access_log.info("%s", dump_json(entry).decode())


def _peers(header: str) -> tuple[str, ...]:
    """HOST:PORT items of a header; what is none is left out."""
    return tuple(item for each in header.split(",") if _PEER.fullmatch(item := each.strip()))

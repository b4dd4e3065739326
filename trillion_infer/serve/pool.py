"""A worker of a pool: what its router must know, its role, its timeline."""

import hmac
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from trillion_infer.core.errors import ConfigError
from trillion_infer.engine.disaggregated import DisaggregatedEngine
from trillion_infer.engine.handoff.worker import HandoffEngine
from trillion_infer.serve.errors import ApiError
from trillion_infer.serve.fields import Fields
from trillion_infer.serve.metrics import pages_in_use
from trillion_infer.serve.replies import json_reply
from trillion_infer.serve.server import Server

STATE_S = 0.3
"""Seconds that /health waits for the engine, in the middle of a step, to tell its load."""


async def worker_state(server: Server) -> dict[str, Any]:
    """Role, hand-off address and, unless a step takes long, load of a worker; empty for a server without a role."""
    worker = server.worker
    if worker is None:
        return {}
    state: dict[str, Any] = {"role": worker.role, "next_role": worker.next_role, "handoff": worker.links.address}
    stats = await server.stats(STATE_S)
    if stats:
        state |= {
            "queued_tokens": stats["queued_tokens"],
            "held": stats["handoff.held"],
            "kv_in_use": round(pages_in_use(stats), 4),
        }
    return state


async def role(http: HttpRequest) -> Response:
    """GET: the worker's state. POST {"role": ROLE}: drains it of the old role's work, then changes; poll with GET."""
    server, worker = _admin(http)
    if http.method == "POST":
        wanted = Fields(await server.body(http), ("role",)).need("role", str)
        try:
            await server.thread.call(lambda: worker.switch(wanted))
        except ConfigError as error:
            raise ApiError(400, str(error), param="role") from error
    return json_reply(await worker_state(server))


async def timeline(http: HttpRequest) -> Response:
    """The newest spans of a worker, or of prefill and decode apart in one process, in the Chrome trace format."""
    server = _allowed(http)
    engine = server.thread.generator.engine
    if not isinstance(engine, HandoffEngine | DisaggregatedEngine):
        raise ApiError(404, "there is no timeline: this server was started without --role and --disaggregate.")
    return json_reply({"traceEvents": await server.thread.call(engine.trace_events)})


def _admin(http: HttpRequest) -> tuple[Server, HandoffEngine]:
    server = _allowed(http)
    if server.worker is None:
        raise ApiError(404, "there is no such endpoint: this server was started without --role.")
    return server, server.worker


def _allowed(http: HttpRequest) -> Server:
    """Raises ApiError unless the request has the admin key."""
    server: Server = http.app.state.server
    key = server.options.admin_key
    if key is None:
        raise ApiError(404, "there is no such endpoint: this server was started without --admin_key.")
    given = http.headers.get("authorization", "").removeprefix("Bearer ")
    if not hmac.compare_digest(given.encode(), key.encode()):
        raise ApiError(401, "the admin key is missing or wrong.", code="invalid_admin_key")
    return server

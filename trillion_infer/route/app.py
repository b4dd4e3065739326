"""The router's HTTP face."""

import asyncio
import contextlib
import hmac
import json
import logging
import math
import re
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from trillion_infer.core.errors import QueueFullError
from trillion_infer.core.prompt_prefix import tenant_of
from trillion_infer.route.config import RouterConfig
from trillion_infer.route.forward import Forwarder, Relay, cancelled
from trillion_infer.route.health import HealthPoller
from trillion_infer.route.metrics import Metrics
from trillion_infer.route.policy import NoWorkerError, Policy
from trillion_infer.route.request import RequestView, view_request
from trillion_infer.route.upstream import Answer, Outgoing, WorkerFailedError

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_KEEPALIVE_S = 2.0  # shorter than servers keep idle connections, so that none is used while it is being closed
_GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses")


def build_app(config: RouterConfig) -> Starlette:
    """The router as an ASGI application."""
    router = Router(config)
    routes = [
        Route("/health", router.health),
        Route("/metrics", router.metrics_page),
        *(Route(path, router.generate, methods=["POST"]) for path in _GENERATING),
        *(Route(path, router.pass_through, methods=["POST"]) for path in ("/tokenize", "/detokenize")),
        Route("/abort", router.abort, methods=["POST"]),
        Route("/v1/models", router.pass_through),
        Route("/v1/models/{model:path}", router.pass_through),
    ]
    if config.admin_key is not None:
        routes += [
            Route("/admin/workers", router.workers),
            Route("/admin/drain", router.drain, methods=["POST"]),
            Route("/admin/resume", router.drain, methods=["POST"]),
        ]
    return Starlette(routes=routes, lifespan=router.lifespan, exception_handlers={HTTPException: _http_error})


class Router:
    """Endpoints, and what they share."""

    def __init__(self, config: RouterConfig):
        self._config = config
        self._policy = Policy(config, time.monotonic)
        self._metrics = Metrics()
        self._client = httpx.AsyncClient(
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEEPALIVE_S), trust_env=False
        )
        self._forwarder = Forwarder(self._policy, self._client, self._metrics)
        self._log = logging.getLogger(__name__)
        self._mean_s = 1.0

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Polls health while the application runs."""
        poller = HealthPoller(list(self._policy.workers.values()), self._client, self._config.health_interval_s)
        await poller.look()
        polling = asyncio.create_task(poller.run())
        try:
            yield
        finally:
            await cancelled(polling)
            await self._client.aclose()

    async def health(self, _: Request) -> Response:
        """200 while some worker can take requests."""
        ready = sum(worker.reachable and worker.decodes for worker in self._policy.workers.values())
        return JSONResponse({"workers": len(self._policy.workers), "ready": ready}, 200 if ready else 503)

    async def metrics_page(self, _: Request) -> Response:
        """Prometheus text."""
        page = self._metrics.page(self._policy.workers.values())
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def workers(self, request: Request) -> Response:
        """Every worker's state."""
        if refusal := self._not_admin(request):
            return refusal
        homes = self._policy.homes.counts()
        rows = [
            {
                "url": worker.url,
                "up": worker.up,
                "draining": worker.draining,
                "circuit": worker.breaker.state,
                "requests": worker.requests,
                "prefill_tokens": worker.prefill_tokens,
                "decode_tokens": worker.decode_tokens,
                "sessions": homes.get(worker.url, 0),
                "role": worker.role,
                "queued_tokens": worker.queued_tokens,
                "kv_in_use": worker.kv_in_use,
            }
            for worker in self._policy.workers.values()
        ]
        return JSONResponse({"workers": rows})

    async def drain(self, request: Request) -> Response:
        """Drains or resumes ?worker=URL: requests in flight go on, new ones go elsewhere."""
        if refusal := self._not_admin(request):
            return refusal
        worker = self._policy.workers.get(request.query_params.get("worker", ""))
        if worker is None:
            known = ", ".join(self._policy.workers)
            return _error(404, f"?worker= must be one of {known}.", "invalid_request_error")
        worker.draining = request.url.path.endswith("/drain")
        return JSONResponse({"worker": worker.url, "draining": worker.draining, "requests": worker.requests})

    async def generate(self, request: Request) -> Response:
        """Routes a completion."""
        body = await self._body(request)
        if isinstance(body, Response):
            return body
        try:
            value = json.loads(body)
        except (ValueError, RecursionError) as error:
            return self._refuse(400, f"the body is not JSON: {error}.", "invalid_request_error")
        if not isinstance(value, dict):
            return self._refuse(400, "the body must be a JSON object.", "invalid_request_error")
        try:
            view = view_request(request.url.path, value)
        except RecursionError:
            return self._refuse(400, "the body is nested too deeply.", "invalid_request_error")
        return await self._route(request, body, view)

    async def pass_through(self, request: Request) -> Response:
        """Sends a request that generates nothing to any worker."""
        body = await self._body(request)
        if isinstance(body, Response):
            return body
        return await self._route(request, body, RequestView(request.url.path, False, b"", None, 1, None))

    async def abort(self, request: Request) -> Response:
        """Asks every worker to end a request; the answer is of the one that had it, if one had."""
        body = await self._body(request)
        if isinstance(body, Response):
            return body
        headers = request.headers.items()
        answers = await self._forwarder.ask_all(Outgoing("POST", "/abort", headers, body))
        if not answers:
            return self._refuse(503, "no worker can be reached; try later.", "server_error", {"retry-after": "2"})
        return _whole(next((a for a in answers if b'"aborted":true' in a.body.replace(b" ", b"")), answers[0]), {})

    async def _route(self, request: Request, body: bytes, view: RequestView) -> Response:
        started = time.monotonic()
        request_id = request.headers.get("x-request-id", "")
        request_id = request_id if _REQUEST_ID.fullmatch(request_id) else f"req-{uuid.uuid4().hex}"
        key = request.headers.get("authorization", "")
        tenant = tenant_of(key)
        call = self._policy.call(view, request.headers.get("x-session-affinity") or None, tenant)
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        outgoing = Outgoing(request.method, target, request.headers.items(), body)
        worker, status, headers = "", 499, {}
        relayed = False

        def done(status: int | str) -> None:
            seconds = time.monotonic() - started
            self._mean_s += 0.1 * (seconds - self._mean_s)
            self._metrics.duration.observe(seconds)
            self._metrics.requests.labels(worker, str(status)).inc()
            line = {"request_id": request_id, "path": view.path, "worker": worker, "status": status}
            self._log.info(json.dumps({**line, "seconds": round(seconds, 4), "tried": sorted(call.tried)}))

        try:
            result = await _unless_gone(request, self._forwarder.forward(call, outgoing, request_id))
            if result is None:
                return Response(status_code=499)
            answer, worker = result
            headers = {"x-request-id": request_id, "x-worker": worker}
            if isinstance(answer, Relay):
                relayed = True
                return _Relayed(answer, headers, done)
            status = answer.status
            return _whole(answer, headers)
        except QueueFullError as error:
            status, headers = 429, {"retry-after": str(self._retry_after())}
            return self._refuse(status, str(error), "rate_limit_error", {**headers, "x-request-id": request_id})
        except NoWorkerError as error:
            status = 503
            return self._refuse(status, str(error), "server_error", {"retry-after": "2", "x-request-id": request_id})
        except WorkerFailedError as error:
            headers = {"x-request-id": request_id}
            if error.answer is not None:
                status = error.answer.status
                if status in (429, 503) and not any(n.lower() == "retry-after" for n, _ in error.answer.headers):
                    headers["retry-after"] = str(self._retry_after())
                return _whole(error.answer, headers)
            status = 502
            tried = ", ".join(sorted(call.tried))
            return self._refuse(status, f"every attempt failed ({tried}); last: {error}", "server_error", headers)
        finally:
            if not relayed:
                done(status)

    def _retry_after(self) -> int:
        """Seconds until a request probably ends somewhere, from 1 to 60."""
        running = sum(worker.requests for worker in self._policy.workers.values())
        return min(60, max(1, math.ceil(self._mean_s / max(1, running))))

    async def _body(self, request: Request) -> bytes | Response:
        held, size, limit = [], 0, self._config.max_body_bytes
        try:
            async with asyncio.timeout(self._config.idle_timeout_s):
                async for piece in request.stream():
                    size += len(piece)
                    if size > limit:
                        return self._refuse(413, f"the body is above {limit} bytes.", "invalid_request_error")
                    held.append(piece)
        except TimeoutError:
            return self._refuse(408, "the body did not arrive in time.", "invalid_request_error")
        except ClientDisconnect:
            return Response(status_code=499)
        return b"".join(held)

    def _refuse(self, status: int, message: str, kind: str, headers: dict[str, str] | None = None) -> Response:
        self._metrics.rejected.labels(str(status)).inc()
        return _error(status, message, kind, headers)

    def _not_admin(self, request: Request) -> Response | None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if hmac.compare_digest(given.encode(), (self._config.admin_key or "").encode()):
            return None
        return _error(401, "the admin key is missing or wrong.", "authentication_error")


class _Relayed(StreamingResponse):
    """Streams a relay and always closes it."""

    def __init__(self, relay: Relay, headers: dict[str, str], done):
        super().__init__(relay.events(), media_type="text/event-stream")
        self._relay, self._done = relay, done
        for name, value in [*relay.headers, *headers.items()]:
            self.headers[name] = value

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._done(200 if self._relay.outcome == "ok" else self._relay.outcome)
            await self._relay.close()


def _whole(answer: Answer, headers: dict[str, str]) -> Response:
    response = Response(answer.body, answer.status)
    for name, value in [*answer.headers, *headers.items()]:
        response.headers[name] = value
    return response


def _error(status: int, message: str, kind: str, headers: dict[str, str] | None = None) -> Response:
    error = {"message": message, "type": kind, "param": None, "code": status}
    return JSONResponse({"error": error}, status, headers)


async def _http_error(request: Request, error: Any) -> Response:
    """The answer to an HTTPException: a path or a method that is not there."""
    message = f"{request.method} {request.url.path}: {error.detail}."
    return _error(error.status_code, message, "invalid_request_error", dict(error.headers or {}))


async def _unless_gone(request: Request, work):
    """The result of `work`, or None if the client went away first; then `work` is cancelled."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await cancelled(gone)
        if not task.done():
            await cancelled(task)

"""One attempt at one worker: sends the request and reads the answer, with every failure as one error."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import httpx

from trillion_infer.core.errors import TrillionInferError
from trillion_infer.route.config import RouterConfig
from trillion_infer.route.sse import event_json, has_tokens, is_end, server_error, split_events

Event = tuple[bytes, dict | None]
_RETRIED = (429, 500, 502, 503, 504)
_NOT_FORWARDED = frozenset(
    "connection expect content-encoding content-length date host keep-alive proxy-authenticate proxy-authorization "
    "server te trailer transfer-encoding upgrade accept-encoding x-request-id x-prefill-workers".split()
)


@dataclasses.dataclass(frozen=True)
class Outgoing:
    """A client's request, ready to be sent to any worker."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes


@dataclasses.dataclass(frozen=True)
class Answer:
    """A whole answer."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


class WorkerFailedError(TrillionInferError, RuntimeError):
    """An attempt failed and another worker may do better. `answer` is what the worker said, if it said anything."""

    def __init__(self, reason: str, message: str, answer: Answer | None = None):
        super().__init__(message)
        self.reason, self.answer = reason, answer


class Stream:
    """A worker's event stream. `head` holds the events up to the first token, already read."""

    def __init__(self, response: httpx.Response, idle_timeout_s: float):
        self.headers = kept_headers(response.headers.multi_items())
        self._response, self._idle_timeout_s = response, idle_timeout_s
        self._events = split_events(response.aiter_raw())
        self._head: list[Event] = []

    async def read_head(self) -> None:
        """Reads on to the first event with tokens, so that until then another worker can be tried."""
        while True:
            raw, value = await self._next()
            self._head.append((raw, value))
            if is_end(raw, value) or (value is not None and has_tokens(value)):
                return

    async def events(self) -> AsyncIterator[Event]:
        """Every event up to the one that ends the stream. Raises WorkerFailedError if it breaks off before."""
        for event in self._head:
            yield event
            if is_end(*event):
                return
        while True:
            try:
                async with asyncio.timeout(self._idle_timeout_s):
                    event = await self._next()
            except TimeoutError:
                message = f"the worker sent nothing for {self._idle_timeout_s:g} seconds."
                raise WorkerFailedError("idle", message) from None
            yield event
            if is_end(*event):
                return

    async def close(self) -> None:
        """Closes the connection; a worker takes that for an abort."""
        await self._response.aclose()

    async def _next(self) -> Event:
        try:
            raw = await anext(self._events)
        except StopAsyncIteration:
            raise WorkerFailedError("broken", "the worker's stream ended before its last event.") from None
        except (httpx.HTTPError, httpx.StreamError, ValueError) as error:
            raise WorkerFailedError("broken", f"the worker's stream broke: {_said(error)}.") from error
        value = event_json(raw)
        message = server_error(value) if value is not None else None
        if message is not None:
            raise WorkerFailedError("error_event", f"the worker failed: {message}")
        return raw, value


async def attempt(
    client: httpx.AsyncClient,
    url: str,
    outgoing: Outgoing,
    request_id: str,
    config: RouterConfig,
    feeders: tuple[str, ...] = (),
) -> Answer | Stream:
    """Sends a request to the worker at `url`; returns its whole answer, or its stream from the first token on.

    feeders: hand-off addresses of the workers that can prefill for it, the best first.
    Raises WorkerFailedError for a failed connection, a timeout, a broken answer, and statuses 429 and 500 to 504.
    """
    headers = [*kept_headers(outgoing.headers), ("accept-encoding", "identity")]
    headers += [("x-request-id", request_id)] if request_id else []
    headers += [("x-prefill-workers", ",".join(feeders))] if feeders else []
    timeout = httpx.Timeout(None, connect=config.connect_timeout_s)
    request = client.build_request(
        outgoing.method, url + outgoing.target, headers=headers, content=outgoing.body, timeout=timeout
    )
    try:
        async with asyncio.timeout(config.first_token_timeout_s):
            return await _read(client, request, config)
    except TimeoutError:
        message = f"the worker gave no token within {config.first_token_timeout_s:g} seconds."
        raise WorkerFailedError("timeout", message) from None


async def _read(client: httpx.AsyncClient, request: httpx.Request, config: RouterConfig) -> Answer | Stream:
    try:
        response = await client.send(request, stream=True)
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise WorkerFailedError("connect", f"the worker cannot be reached: {_said(error)}.") from error
    except httpx.HTTPError as error:
        raise WorkerFailedError("broken", f"the worker closed the connection: {_said(error)}.") from error
    try:
        if response.status_code == 200 and "text/event-stream" in response.headers.get("content-type", ""):
            stream = Stream(response, config.idle_timeout_s)
            await stream.read_head()
            return stream
        try:
            body = await response.aread()
        except httpx.HTTPError as error:
            raise WorkerFailedError("broken", f"the worker's answer broke: {_said(error)}.") from error
    except BaseException:
        await response.aclose()
        raise
    await response.aclose()
    answer = Answer(response.status_code, kept_headers(response.headers.multi_items()), body)
    if response.status_code in _RETRIED:
        reason = "busy" if response.status_code in (429, 503) else f"status_{response.status_code}"
        raise WorkerFailedError(reason, f"the worker answered {response.status_code}.", answer)
    return answer


def kept_headers(headers: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Headers that pass through: not those of one connection, nor those the router sets itself."""
    return [(name, value) for name, value in headers if name.lower() not in _NOT_FORWARDED]


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__

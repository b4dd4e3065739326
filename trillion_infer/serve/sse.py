"""Server-sent events, and noticing that a client has gone."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trillion_infer.serve.errors import as_api_error
from trillion_infer.serve.fields import dump_json

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection; nobody reads the answer."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled (and ClientGone raised) if the client closes the connection first."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends each JSON value of `events` as one event, and `[DONE]` at the end.

    An error after the headers becomes an event of its own. `close` is called when the stream ends in any way.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[Any], close: Callable[[], None], headers: dict[str, str], named: bool = False
    ):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._events, self._close, self._named = events, close, named

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._pump(send))
        except (ClientGone, OSError):
            return
        finally:
            self._close()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for event in self._events:
                await _send_event(send, event, event["type"] if self._named else None)
        except OSError:
            raise
        except Exception as error:
            await _send_event(send, as_api_error(error).body(), "error" if self._named else None)
        tail = b"" if self._named else b"data: [DONE]\n\n"
        await send({"type": "http.response.body", "body": tail, "more_body": False})


async def _send_event(send: Send, event: Any, name: str | None) -> None:
    head = b"" if name is None else f"event: {name}\n".encode()
    await send({"type": "http.response.body", "body": head + b"data: " + dump_json(event) + b"\n\n", "more_body": True})

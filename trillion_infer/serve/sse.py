"""Server-sent events, and noticing that a client has gone."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trillion_infer.generation.outputs import Delta
from trillion_infer.serve.errors import as_api_error
from trillion_infer.serve.fields import dump_json
from trillion_infer.serve.jobs import Job
from trillion_infer.serve.protocol import CHUNK_EXTENSION

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


class Writer(Protocol):
    """Turns a job into events: JSON values, or bytes that are JSON already."""

    def begin(self) -> list[Any]:
        """Events before the first delta."""
        ...

    def add(self, number: int, delta: Delta) -> list[Any]:
        """Events of a delta of prompt `number`."""
        ...

    def end(self) -> list[Any]:
        """Events after the last delta, when the job's outputs are there."""
        ...


class EventStream(Response):
    """Sends the events of a job, and `[DONE]` at the end. What one step brings is one write to the connection.

    An error after the headers becomes an event of its own. `close` is called when the stream ends in any way. named:
    each event has its `type` as its name, and nothing marks the end.
    """

    media_type = "text/event-stream"

    def __init__(self, job: Job, writer: Writer, close: Callable[[], None], named: bool = False):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", "X-Request-Id": job.id})
        del self.headers["content-length"]
        self._job, self._writer, self._close, self._named = job, writer, close, named

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (write := scope.get("extensions", {}).get(CHUNK_EXTENSION)) is not None:
            self._job.at_once = partial(self._write_at_once, write)
        try:
            await until_disconnect(receive, self._pump(send))
        except (ClientGone, OSError):
            return
        finally:
            self._job.at_once = None  # which leads back here: a cycle would wait for the collector
            self._close()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            if events := self._writer.begin():
                await send(_part(self._encode(events)))
            while deltas := await self._job.take():
                if body := self._encode([event for each in deltas for event in self._writer.add(*each)]):
                    await send(_part(body))
            tail = self._encode(self._writer.end())
        except OSError:
            raise
        except Exception as error:
            event = as_api_error(error).body()
            tail = self._encode([{"type": "error", **event} if self._named else event])
        await send({**_part(tail if self._named else tail + b"data: [DONE]\n\n"), "more_body": False})

    def _write_at_once(self, write: Callable[[bytes], bool], number: int, delta: Delta) -> bool:
        """Writes the events of a delta past the layers of ASGI; False, and nothing is done, where `send` must wait."""
        if not write(b""):
            return False
        if body := self._encode(self._writer.add(number, delta)):
            write(body)
        return True

    def _encode(self, events: list[Any]) -> bytes:
        return b"".join(map(_named_event if self._named else _event, events))


def _part(body: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": True}


def _event(event: Any) -> bytes:
    return b"data: %b\n\n" % (event if isinstance(event, bytes) else dump_json(event))


def _named_event(event: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), dump_json(event))

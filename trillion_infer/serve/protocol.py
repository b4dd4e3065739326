"""Connections whose request head must arrive soon and be small, whatever they send."""

import asyncio
from functools import partial
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from trillion_infer.serve.errors import ApiError
from trillion_infer.serve.fields import dump_json

MAX_HEAD_BYTES = 64 * 1024
"""Largest request line with its headers."""
CHUNK_EXTENSION = "trillion_infer.chunk"
"""Name in a scope's extensions of a function that writes a chunk of a streamed answer at once, or returns False where
the connection takes none now; `send` does the same by way of every layer between."""


class GuardedProtocol(HttpToolsProtocol):
    """Closes a connection that has brought no whole head within `head_timeout_s`, from its start or from the first byte
    of its next request, and refuses what is no HTTP with an error as every other."""

    def __init__(self, *args: Any, head_timeout_s: float, **options: Any):
        super().__init__(*args, **options)
        self._head_timeout_s = head_timeout_s
        self._deadline: asyncio.TimerHandle | None = None
        self._head_bytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_there()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._deadline is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, f"the request's head is larger than {MAX_HEAD_BYTES} bytes; send less.")

    def on_message_begin(self) -> None:
        self._await_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_is_there()
        super().on_headers_complete()
        if (cycle := self.cycle) is not None:  # none where another protocol takes the connection over
            extensions: dict[str, Any] = self.scope.setdefault("extensions", {})  # pyright: ignore[reportAssignmentType]
            extensions[CHUNK_EXTENSION] = partial(_write_chunk, cycle)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is no HTTP request.")

    def _await_head(self) -> None:
        self._head_is_there()
        self._head_bytes = 0
        self._deadline = self.loop.call_later(self._head_timeout_s, self.transport.close)

    def _head_is_there(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, status: int, message: str) -> None:
        """Answers before there is a request, and closes."""
        self._head_is_there()
        body = dump_json(ApiError(status, message).body())
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
        self.transport.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        self.transport.close()


def _write_chunk(cycle: RequestResponseCycle, body: bytes) -> bool:
    if not (cycle.response_started and cycle.chunked_encoding) or cycle.response_complete or cycle.flow.write_paused:
        return False
    if body and not cycle.disconnected:  # an empty chunk would end the answer
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
    return True

"""Many streamed completions at once, by a client that only notes when bytes came and reads them afterwards."""

import json
import os
import select
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from trillion_infer.benchmark.stream_client import Streamed
from trillion_infer.core.errors import TrillionInferError


@dataclass
class _Connection:
    began: float
    pieces: list[tuple[float, bytes]] = field(default_factory=list)


def stream_together(url: str, bodies: Sequence[dict[str, Any]], timeout_s: float = 120.0) -> list[Streamed]:
    """Posts every body to /v1/completions as a stream, all at once, and reads them to their ends.

    A piece has come when the kernel says so, and costs this process a read: hardly anything of the client is in the
    times. A character counts as a token, which it is of the scripted model. Raises TrillionInferError where the server
    is silent for `timeout_s`.
    """
    address = urlsplit(url)
    found, live = [], {}
    with select.epoll() as ready:
        for body in bodies:
            connection = socket.create_connection((address.hostname, address.port))
            found.append(_Connection(time.monotonic()))
            connection.sendall(_request(body))
            live[connection.fileno()] = connection, found[-1].pieces
            ready.register(connection, select.EPOLLIN)
        while live:
            events = ready.poll(timeout_s)
            now = time.monotonic()
            if not events:
                raise TrillionInferError(f"the server was silent for {timeout_s:g} s.")
            for number, _ in events:
                piece = os.read(number, 8192)
                live[number][1].append((now, piece))
                if not piece:
                    live.pop(number)[0].close()
    return [_read(connection) for connection in found]


def _request(body: dict[str, Any]) -> bytes:
    content = json.dumps({**body, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: server\r\nConnection: close\r\nContent-Length: {len(content)}"
    return head.encode() + b"\r\n\r\n" + content


def _read(connection: _Connection) -> Streamed:
    """What the pieces say, each event with the time of the piece that ended it."""
    found, ended = Streamed(connection.began), False
    for when, line in _lines(connection.pieces):
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            ended = True
            break
        event = json.loads(line[6:])
        if "error" in event:
            found.error = event["error"]["message"]
            return found
        for choice in event["choices"]:
            found.finish_reason = choice["finish_reason"] or found.finish_reason
            if choice["text"]:
                found.times.append(when)
                found.counts.append(len(choice["text"]))
    if not ended:
        found.error = "the stream ended without [DONE]."
    return found


def _lines(pieces: list[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    held = b""
    for when, piece in pieces:
        *whole, held = (held + piece).split(b"\n")
        yield from ((when, line) for line in whole)

"""A client of streamed completions that costs little, so that it hardly adds to what it measures."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Streamed:
    """What a stream brought. times: `time.monotonic()` of each event with tokens; counts: tokens in each of them.

    Marks are those of this machine's clock, the same in every process. error: why it did not end as it should.
    """

    began: float
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    @property
    def first_token_s(self) -> float:
        return self.times[0] - self.began


async def stream_completion(
    url: str, body: dict[str, Any], leave_after: int | None = None, request_id: str = ""
) -> Streamed:
    """Posts `body` to /v1/completions as a stream and reads it to its end; after `leave_after` tokens hangs up.

    Never raises for what the server does: the reason stands in `error`.
    """
    address, found = urlsplit(url), Streamed(time.monotonic())
    try:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        try:
            await _post(writer, {**body, "stream": True, "return_token_ids": True}, request_id)
            await _read(reader, found, leave_after)
        finally:
            writer.close()
    except (OSError, asyncio.IncompleteReadError) as error:
        found.error = found.error or f"{type(error).__name__}: {error}"
    return found


async def _post(writer: asyncio.StreamWriter, body: dict[str, Any], request_id: str) -> None:
    content = json.dumps(body).encode()
    name = f"X-Request-Id: {request_id}\r\n" if request_id else ""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: server\r\nConnection: close\r\n{name}Content-Length: "
    writer.write(f"{head}{len(content)}\r\n\r\n".encode() + content)
    await writer.drain()


async def _read(reader: asyncio.StreamReader, found: Streamed, leave_after: int | None) -> None:
    status = (await reader.readline()).split()
    if len(status) < 2 or status[1] != b"200":
        found.error = (b" ".join(status) + b" " + await reader.read(2000)).decode("utf-8", "replace")
        return
    while line := await reader.readline():
        if not line.startswith(b"data: "):
            continue
        now = time.monotonic()
        if line.startswith(b"data: [DONE]"):
            return
        event = json.loads(line[6:])
        if "error" in event:
            found.error = event["error"]["message"]
            return
        for choice in event["choices"]:
            found.finish_reason = choice["finish_reason"] or found.finish_reason
            if choice["token_ids"]:
                found.times.append(now)
                found.counts.append(len(choice["token_ids"]))
        if leave_after is not None and found.tokens >= leave_after:
            return
    found.error = "the stream ended without [DONE]."

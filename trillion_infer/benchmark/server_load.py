"""Load on a server whose model costs nothing: latency it adds, what a token costs the host, and whether it leaks."""

import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np

from trillion_infer.benchmark.light_client import stream_together
from trillion_infer.benchmark.serving import MODEL, ServerProcess, server_process
from trillion_infer.benchmark.stream_client import Streamed, stream_completion
from trillion_infer.testing.scripted_server import make_marks

SERVER = "trillion_infer.testing.scripted_server"


def added_latency_ms(streams: int = 50, tokens: int = 200, step_ms: float = 20.0, repeats: int = 1) -> dict[str, float]:
    """Percentiles of the time from the engine giving a token to the client having it, over `streams` at once; of the
    best of `repeats` runs.

    The client is another process on the same machine that only notes when bytes have come. It has a core to itself
    where there are several, as if it were another machine.
    """
    runs = [_added_latency_ms(streams, tokens, step_ms) for _ in range(repeats)]
    return min(runs, key=lambda run: run["added_p99_ms"])


def _added_latency_ms(streams: int, tokens: int, step_ms: float) -> dict[str, float]:
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "marks"
        marks = make_marks(path)
        options = {"step_ms": step_ms, "max_running": streams, "marks": str(path)}
        with server_process(options, SERVER, cores=cores[:-1]) as server:
            lengths = range(16, 16 + streams)
            body = {"model": MODEL, "max_tokens": tokens, "ignore_eos": True}
            os.sched_setaffinity(0, cores[-1:])
            try:
                found = stream_together(server.url, [{**body, "prompt": [97] * length} for length in lengths])
            finally:
                os.sched_setaffinity(0, cores)
        added = list(_added(found, lengths, marks))
    return {f"added_p{percent}_ms": float(np.percentile(added, percent)) for percent in (50, 90, 99)}


def _added(streams: list[Streamed], lengths: range, marks: np.ndarray) -> Iterator[float]:
    for length, stream in zip(lengths, streams, strict=True):
        assert stream.error is None, stream.error
        ends = np.cumsum(stream.counts)
        yield from (1e3 * (t - marks[length, end - 1]) for t, end in zip(stream.times, ends, strict=True))


@dataclass
class Load:
    """What a time under load gave. rss_mb: the server's resident memory at each fifth of the time, MiB."""

    requests: int = 0
    left: int = 0
    aborted: int = 0
    tokens: int = 0
    errors: list[str] = field(default_factory=list)
    cpu_s: float = 0.0
    rss_mb: list[float] = field(default_factory=list)
    idle: dict[str, Any] = field(default_factory=dict)

    @property
    def host_us_per_token(self) -> float:
        """CPU of the server process a generated token, in microseconds."""
        return 1e6 * self.cpu_s / max(1, self.tokens)


def load(seconds: float, streams: int = 200, step_ms: float = 20.0, seed: int = 0) -> Load:
    """`streams` clients at once for `seconds`: whole answers, clients that hang up, and aborts, at random."""
    options = {"step_ms": step_ms, "max_running": streams}
    with server_process(options, SERVER) as server:
        found = asyncio.run(_under_load(server, seconds, streams, random.Random(seed)))
        found.idle = _when_idle(server.url)
    return found


async def _under_load(server: ServerProcess, seconds: float, streams: int, rng: random.Random) -> Load:
    found, end, cpu = Load(), time.monotonic() + seconds, _cpu_s(server.pid)
    clients = [
        asyncio.create_task(_client(server.url, end, found, random.Random(rng.random()))) for _ in range(streams)
    ]
    for _ in range(5):
        await asyncio.sleep(seconds / 5)
        found.rss_mb.append(_rss_mb(server.pid))
    await asyncio.gather(*clients)
    found.cpu_s = _cpu_s(server.pid) - cpu
    return found


async def _client(url: str, end: float, found: Load, rng: random.Random) -> None:
    while time.monotonic() < end:
        tokens, fate = rng.randint(1, 120), rng.random()
        body = {"model": MODEL, "prompt": [97] * rng.randint(1, 400), "max_tokens": tokens, "ignore_eos": True}
        name = f"load-{rng.getrandbits(60)}"
        leave = rng.randint(1, tokens) if fate < 0.2 else None
        aborting = asyncio.create_task(_abort(url, name, rng.uniform(0, 1))) if fate > 0.9 else None
        stream = await stream_completion(url, body, leave, name)
        found.requests += 1
        found.tokens += stream.tokens
        found.left += leave is not None
        if aborting is not None:
            found.aborted += await aborting
        elif stream.error is not None:
            found.errors.append(stream.error)
        elif leave is None and stream.tokens != tokens:
            found.errors.append(f"{stream.tokens} of {tokens} tokens")


async def _abort(url: str, name: str, after_s: float) -> bool:
    await asyncio.sleep(after_s)
    reader, writer = await asyncio.open_connection(*_address(url))
    body = json.dumps({"request_id": f"cmpl-{name}"}).encode()
    head = f"POST /abort HTTP/1.1\r\nHost: server\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    answer = await reader.read()
    writer.close()
    return b'"aborted":true' in answer


def _when_idle(url: str) -> dict[str, Any]:
    """The server's figures once nothing is in flight, after at most 10 s."""
    status: dict[str, Any] = {}
    for _ in range(100):
        with urlopen(f"{url}/status", timeout=10) as answer:
            status = json.load(answer)
        if not status["requests"] and not status["engine"].get("running"):
            break
        time.sleep(0.1)
    return status


def _address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


def _cpu_s(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss_mb(process: int) -> float:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

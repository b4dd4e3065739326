"""The serve workload: requests over HTTP to a server process, all at once, streamed."""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np

from trillion_infer.benchmark.stream_client import Streamed, stream_completion
from trillion_infer.core.errors import TrillionInferError
from trillion_infer.testing.ports import free_port

MODEL = "benchmark"


def serve(options: Mapping[str, Any], draws: Sequence[Sequence[Sequence[int]]], out: int) -> dict[str, float]:
    """Figures of the fastest of `draws` (prompts of a run each), the last of which only warms the server up.

    serve_out_tok_s: generated tokens a second; serve_first_token_p50_ms and p99: from sending a request to its first
    token; serve_token_p50_ms and p99: between two events of a stream. Raises TrillionInferError when the server or a
    request fails.
    """
    *repeats, spare = draws
    with server_process(options) as server:
        asyncio.run(_run(server.url, spare[:2], 4))
        runs = [asyncio.run(_run(server.url, prompts, out)) for prompts in repeats]
    return max(runs, key=lambda figures: figures["serve_out_tok_s"])


async def _run(url: str, prompts: Sequence[Sequence[int]], out: int) -> dict[str, float]:
    start = time.monotonic()
    body = {"model": MODEL, "max_tokens": out, "temperature": 0, "ignore_eos": True}
    streams = await asyncio.gather(*(stream_completion(url, {**body, "prompt": list(ids)}) for ids in prompts))
    seconds = time.monotonic() - start
    for stream in streams:
        if stream.error is not None or stream.tokens != out:
            raise TrillionInferError(f"a request gave {stream.tokens} of {out} tokens: {stream.error or 'no error'}")
    return {"serve_out_tok_s": out * len(prompts) / seconds, **latencies(streams)}


def latencies(streams: Sequence[Streamed]) -> dict[str, float]:
    """Percentiles in milliseconds: to the first token, and between events."""
    first = [1e3 * stream.first_token_s for stream in streams]
    gaps = np.concatenate([1e3 * np.diff(stream.times) for stream in streams])
    figures = {"first_token": first, "token": gaps}
    return {
        f"serve_{name}_p{percent}_ms": float(np.percentile(values, percent))
        for name, values in figures.items()
        if len(values)
        for percent in (50, 99)
    }


@dataclass(frozen=True)
class ServerProcess:
    """A server that answers, and the process it is."""

    url: str
    pid: int


@contextmanager
def server_process(
    options: Mapping[str, Any],
    module: str = "trillion_infer.benchmark.served",
    handoff: Mapping[str, Any] | None = None,
    cores: Sequence[int] | None = None,
) -> Iterator[ServerProcess]:
    """A server in a process of its own, which ends with the block; `handoff` and `cores` as served.py takes them."""
    port = free_port()
    more = {"handoff": handoff and dict(handoff), "cores": cores and list(cores)}
    request = json.dumps({"options": dict(options), "port": port, **more})
    with tempfile.TemporaryFile("w+", encoding="utf-8") as said:
        process = subprocess.Popen([sys.executable, "-m", module, request], stdout=said, stderr=said)
        try:
            url = f"http://127.0.0.1:{port}"
            while not _answers(url):
                if process.poll() is not None:
                    said.seek(0)
                    words = said.read().strip().splitlines()
                    raise TrillionInferError(f"the server did not start: {words[-1] if words else 'it said nothing'}")
                time.sleep(0.1)
            yield ServerProcess(url, process.pid)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _answers(url: str) -> bool:
    try:
        with urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except (URLError, OSError):
        return False

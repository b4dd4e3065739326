"""The interference workload: what long prompts do to the tokens of streams that run.

Steady streams decode while prompts of 2,000 tokens keep arriving, each as soon as the one before is answered. The same
work is given to one server on all cores that computes each prompt in one step, to one that computes them in chunks, and
to a prefill and a decode worker on half of the cores each.
"""

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from trillion_infer.benchmark.serving import MODEL, server_process
from trillion_infer.benchmark.stream_client import Streamed, stream_completion
from trillion_infer.core.errors import ConfigError, TrillionInferError
from trillion_infer.testing.ports import free_port

SETUPS = ("unchunked", "chunked", "apart")


@dataclass(frozen=True)
class Interference:
    """streams: prompts of the streams, `stream_out` tokens each. prompts: the long ones, `prompt_out` tokens each."""

    streams: Sequence[Sequence[int]]
    prompts: Sequence[Sequence[int]]
    stream_out: int = 256
    prompt_out: int = 2


def interference(
    options: Mapping[str, Any], work: Interference, repeats: int = 1, setups: Sequence[str] = SETUPS
) -> dict[str, dict[str, float]]:
    """Figures by setup: token_p50_ms, token_p90_ms and token_max_ms between two events of a stream while a long prompt
    is under way, total_tok_s over all tokens in and out, streams_s and prompts_s until all streams and all prompts had
    ended (a balanced load has them alike), prompt_p50_s from sending a long prompt to its first token.

    Of several repeats the one with the lowest p90. Raises ConfigError with fewer than two cores, TrillionInferError
    when a server or a request fails.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError("the workload interference needs two cores, one for each role; there is one.")
    found: dict[str, dict[str, float]] = {}
    for setup in setups:
        with _servers(setup, options, cores) as url:
            asyncio.run(_drive(url, Interference(work.streams[:1], work.prompts[:1], 4, 2), reverse=True))
            runs = [asyncio.run(_run(url, work, number)) for number in range(repeats)]
        found[setup] = min(runs, key=lambda figures: figures["token_p90_ms"])
    return found


@contextmanager
def _servers(setup: str, options: Mapping[str, Any], cores: Sequence[int]) -> Iterator[str]:
    """The URL to which clients of a setup send."""
    with contextlib.ExitStack() as stack:
        if setup != "apart":
            chosen = {**options, "chunked_prefill": setup == "chunked"}
            yield stack.enter_context(server_process(chosen)).url
            return
        port = free_port()
        half, key = len(cores) // 2, secrets.token_hex(16)
        prefill = {"role": "prefill", "key": key, "port": port}
        decode = {"role": "decode", "key": key, "peers": [f"127.0.0.1:{port}"]}
        stack.enter_context(server_process(options, handoff=prefill, cores=cores[:half]))
        yield stack.enter_context(server_process(options, handoff=decode, cores=cores[half:])).url


@dataclass(frozen=True)
class _Driven:
    """What the streams and the long prompts brought, and how long all took."""

    streams: list[Streamed]
    prompts: list[Streamed]
    seconds: float


async def _drive(url: str, work: Interference, number: int = 0, reverse: bool = False) -> _Driven:
    """Streams and prompts side by side. Prompts are turned by `number`, so that no run finds another's in the cache.

    Raises TrillionInferError for a request that has not given all its tokens.
    """

    def body(ids: Sequence[int], out: int) -> dict[str, Any]:
        turned = list(ids[::-1]) if reverse else [*ids[number:], *ids[:number]]
        return {"model": MODEL, "prompt": turned, "max_tokens": out, "temperature": 0, "ignore_eos": True}

    async def one_by_one() -> list[Streamed]:
        return [await stream_completion(url, body(ids, work.prompt_out)) for ids in work.prompts]

    start = time.monotonic()
    long = asyncio.create_task(one_by_one())
    streams = await asyncio.gather(*(stream_completion(url, body(ids, work.stream_out)) for ids in work.streams))
    prompts = await long
    seconds = time.monotonic() - start
    for stream, out in [*((s, work.stream_out) for s in streams), *((p, work.prompt_out) for p in prompts)]:
        if stream.error is not None or stream.tokens != out:
            raise TrillionInferError(f"a request gave {stream.tokens} of {out} tokens: {stream.error or 'no error'}")
    return _Driven(streams, prompts, seconds)


async def _run(url: str, work: Interference, number: int = 0) -> dict[str, float]:
    """The figures of one run. Raises TrillionInferError where no stream ran beside a prompt."""
    driven = await _drive(url, work, number)
    streams, prompts = driven.streams, driven.prompts
    gaps = _gaps(streams, prompts[0].began, prompts[-1].times[-1])
    if not len(gaps):
        raise TrillionInferError("no stream had a token while a prompt was computed; give the streams more tokens.")
    tokens = sum(len(ids) for ids in (*work.streams, *work.prompts)) + sum(s.tokens for s in (*streams, *prompts))
    return {
        "token_p50_ms": float(np.percentile(gaps, 50)),
        "token_p90_ms": float(np.percentile(gaps, 90)),
        "token_max_ms": float(gaps.max()),
        "total_tok_s": tokens / driven.seconds,
        "streams_s": max(stream.times[-1] for stream in streams) - streams[0].began,
        "prompts_s": prompts[-1].times[-1] - prompts[0].began,
        "prompt_p50_s": float(np.median([prompt.first_token_s for prompt in prompts])),
    }


def _gaps(streams: Sequence[Streamed], begin: float, end: float) -> np.ndarray:
    """Milliseconds between events of a stream that came between `begin` and `end`."""
    gaps = []
    for stream in streams:
        times = np.asarray(stream.times)
        inside = (times[1:] > begin) & (times[:-1] < end)
        gaps.append(1e3 * np.diff(times)[inside])
    return np.concatenate(gaps)


def compare(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """How much lower the p90 between tokens is apart than colocated, and the share of total throughput that is left."""
    apart = found["apart"]
    return {
        "p90_below_unchunked": found["unchunked"]["token_p90_ms"] / apart["token_p90_ms"],
        "p90_below_chunked": found["chunked"]["token_p90_ms"] / apart["token_p90_ms"],
        "throughput_of_unchunked": apart["total_tok_s"] / found["unchunked"]["total_tok_s"],
        "throughput_of_chunked": apart["total_tok_s"] / found["chunked"]["total_tok_s"],
    }

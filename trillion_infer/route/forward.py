"""Carries requests to workers: attempts before the first token, and the relay of a stream after it."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx

from trillion_infer.core.errors import QueueFullError
from trillion_infer.route.metrics import Metrics
from trillion_infer.route.policy import Call, Choice, NoWorkerError, Policy
from trillion_infer.route.replay import ReplayDivergedError, StreamRecord
from trillion_infer.route.sse import event_data, has_tokens, is_end, make_event
from trillion_infer.route.upstream import Answer, Outgoing, Stream, WorkerFailedError, attempt


class Forwarder:
    """Sends requests where the policy says. Holds the connections, and nothing of any one request."""

    def __init__(self, policy: Policy, client: httpx.AsyncClient, metrics: Metrics):
        self.policy, self.config, self.client, self.metrics = policy, policy.config, client, metrics

    async def forward(self, call: Call, outgoing: Outgoing, request_id: str) -> "tuple[Answer | Relay, str]":
        """A whole answer or a stream that has its first token, and the worker it is from.

        Raises QueueFullError and NoWorkerError if no worker takes it, WorkerFailedError if every attempt failed.
        """
        started = time.monotonic()
        result, choice = await self.open(call, outgoing, request_id)
        if isinstance(result, Stream):
            self.metrics.first_token.observe(time.monotonic() - started)
            return Relay(self, call, outgoing, request_id, result, choice), choice.lease.worker.url
        choice.lease.succeed()
        if result.status == 200 and call.view.prompt:
            try:
                value = json.loads(result.body)
            except ValueError:
                value = None
            self.learn(call, choice, value)
        return result, choice.lease.worker.url

    async def open(self, call: Call, outgoing: Outgoing, request_id: str) -> tuple[Answer | Stream, Choice]:
        """Tries up to `max_attempts` workers; each that fails is added to `call.tried`."""
        failure: WorkerFailedError | None = None
        for _ in range(self.config.max_attempts):
            try:
                choice = self.policy.choose(call)
            except (NoWorkerError, QueueFullError):
                if failure is None:
                    raise
                break
            lease, url = choice.lease, choice.lease.worker.url
            self.metrics.choices.labels(url, choice.reason).inc()
            self.metrics.prompt_tokens.labels(url).inc(call.prompt_tokens)
            self.metrics.matched_tokens.labels(url).inc(choice.matched_tokens)
            try:
                return await attempt(self.client, url, outgoing, request_id, self.config, choice.feeders), choice
            except WorkerFailedError as error:
                failure = error
                self.failed(call, choice, error)
            except BaseException:
                lease.abandon()
                raise
        assert failure is not None
        raise failure

    async def ask_all(self, outgoing: Outgoing) -> list[Answer]:
        """The answers of all workers that are up and answer."""
        urls = [worker.url for worker in self.policy.workers.values() if worker.up]
        asked = (attempt(self.client, url, outgoing, "", self.config) for url in urls)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, WorkerFailedError):
                raise answer
        return [answer for answer in answers if isinstance(answer, Answer)]

    def failed(self, call: Call, choice: Choice, failure: WorkerFailedError) -> None:
        """Notes that a worker failed a call, which will not be sent to it again."""
        worker = choice.lease.worker
        call.tried.add(worker.url)
        self.metrics.failures.labels(worker.url, failure.reason).inc()
        if failure.reason == "busy":
            choice.lease.abandon()
            return
        choice.lease.fail()
        if failure.reason == "connect":
            worker.up = False
            worker.lost()

    def learn(self, call: Call, choice: Choice, value: Any) -> None:
        """Learns from the usage in a worker's answer or event, if it has one."""
        usage = value.get("usage") if isinstance(value, dict) else None
        if not isinstance(usage, dict):
            return
        prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
        output = usage.get("completion_tokens", usage.get("output_tokens"))
        if type(prompt) is int and type(output) is int:
            self.policy.estimator.learn(call.view, prompt, output)
        details = usage.get("prompt_tokens_details", usage.get("input_tokens_details")) or {}
        if type(details.get("cached_tokens")) is int:
            self.metrics.cached_tokens.labels(choice.lease.worker.url).inc(max(0, details["cached_tokens"]))


class Relay:
    """A stream on its way to the client. `close` must be called, whether `events` was read or not."""

    def __init__(
        self, forwarder: Forwarder, call: Call, outgoing: Outgoing, request_id: str, stream: Stream, choice: Choice
    ):
        self.headers = stream.headers
        self.outcome = "client_gone"
        self._forwarder, self._call, self._outgoing, self._request_id = forwarder, call, outgoing, request_id
        self._stream, self._choice = stream, choice
        self._replays = forwarder.config.on_worker_failure == "replay" and call.view.no_replay is None
        self._record = StreamRecord() if self._replays else None
        self._in_replay = False
        self._any_token = False

    async def events(self) -> AsyncIterator[bytes]:
        """The client's events. Whatever happens, the last one is the worker's own end or an error that says why."""
        while True:
            try:
                async for raw, value in self._stream.events():
                    if is_end(raw, value):
                        if self._record is not None:
                            self._record.check_end()
                        self._choice.lease.succeed()
                        self.outcome = "ok"
                    if piece := self._take(raw, value):
                        yield piece
                return
            except ReplayDivergedError as error:
                self._forwarder.metrics.replays.labels("diverged").inc()
                yield self._error(f"the worker failed, and {error}")
                return
            except WorkerFailedError as failure:
                message = await self._start_again(failure)
                if message is not None:
                    yield self._error(message)
                    return

    async def close(self) -> None:
        """Ends the worker's stream, if it has not ended, and gives back its share of the load."""
        self._choice.lease.abandon()
        await self._stream.close()

    def _take(self, raw: bytes, value: dict[str, Any] | None) -> bytes | None:
        if value is None:
            return raw if not self._in_replay or event_data(raw) else None
        self._forwarder.learn(self._call, self._choice, value)
        if has_tokens(value):
            if not self._any_token:
                self._any_token = True
                self._choice.lease.first_token()
            self._choice.lease.token()
        if self._record is None:
            return raw
        news = self._record.add(value)
        if not self._in_replay:
            return raw
        return None if news is None else make_event(news)

    async def _start_again(self, failure: WorkerFailedError) -> str | None:
        """Opens a second generation on another worker; returns why that cannot be, or None."""
        forwarder, url = self._forwarder, self._choice.lease.worker.url
        forwarder.failed(self._call, self._choice, failure)
        await self._stream.close()
        if self._record is None:
            forwarder.metrics.replays.labels("refused").inc()
            why = self._call.view.no_replay if forwarder.config.on_worker_failure == "replay" else None
            return f"{failure} The stream cannot go on" + (f": {why}." if why else "; send the request again.")
        try:
            result, choice = await forwarder.open(self._call, self._outgoing, self._request_id)
        except (NoWorkerError, QueueFullError, WorkerFailedError) as error:
            forwarder.metrics.replays.labels("no_worker").inc()
            return f"worker {url} failed after the first token and no other worker could replay: {error}"
        if not isinstance(result, Stream):
            choice.lease.succeed()
            forwarder.metrics.replays.labels("diverged").inc()
            return f"worker {url} failed and another answered the replay with status {result.status}."
        forwarder.metrics.replays.labels("started").inc()
        self._stream, self._choice = result, choice
        self._record.rewind()
        self._in_replay, self._any_token = True, False
        return None

    def _error(self, message: str) -> bytes:
        self.outcome = "error"
        return make_event({"error": {"message": message, "type": "server_error", "param": None, "code": 502}})


async def cancelled(task: asyncio.Task) -> None:
    """Cancels `task` and waits until it has cleaned up after itself."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

"""Workers and routers on loopback, each in a thread of its own."""

import json
import socket
import threading
import time
from collections.abc import Callable

import httpx
import pytest
import uvicorn

from tests.route.fake_worker import FakeWorker
from trillion_infer.route.app import build_app
from trillion_infer.route.config import RouterConfig

_DEADLINE_S = 20.0


class Served:
    """An application served on a free port until `stop`."""

    def __init__(self, app):
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(app, log_level="critical", access_log=False, timeout_graceful_shutdown=0)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()
        wait_until(lambda: self._server.started)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(_DEADLINE_S)


def wait_until(condition: Callable[[], bool]) -> None:
    """Waits for `condition`, at most 20 seconds."""
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in 20 seconds"
        time.sleep(0.01)


@pytest.fixture
def serve():
    """serve(app) -> Served, stopped after the test."""
    served = []

    def start(app) -> Served:
        served.append(Served(app))
        return served[-1]

    yield start
    for one in reversed(served):
        one.stop()


@pytest.fixture
def pool(serve):
    """pool(fakes, **options) -> an httpx.Client of a router over them."""
    clients = []

    def start(fakes: list[FakeWorker], **options) -> httpx.Client:
        urls = tuple(serve(fake.app()).url for fake in fakes)
        for fake, url in zip(fakes, urls, strict=True):
            fake.name = url
        options = {"health_interval_s": 0.05, **options}
        clients.append(httpx.Client(base_url=serve(build_app(RouterConfig(urls, **options))).url, timeout=30))
        return clients[-1]

    yield start
    for client in clients:
        client.close()


def complete(client: httpx.Client, prompt: str, headers: dict | None = None, **fields) -> httpx.Response:
    """One completion that is not streamed."""
    return client.post("/v1/completions", json={"prompt": prompt, **fields}, headers=headers)


def stream_events(client: httpx.Client, path: str = "/v1/completions", **fields) -> list[dict | str]:
    """The events of a stream: objects, and the text of what is no JSON."""
    with client.stream("POST", path, json={"stream": True, **fields}) as answer:
        raw = answer.read().decode()
    data = [piece.removeprefix("data: ") for piece in raw.split("\n\n") if piece]
    return [json.loads(piece) if piece.startswith("{") else piece for piece in data]


def text_of(events: list[dict | str]) -> str:
    """The text that events of a completion or a chat add up to."""
    choices = [choice for event in events if isinstance(event, dict) for choice in event.get("choices", ())]
    return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices)

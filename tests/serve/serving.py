"""A server on a scripted model, on a free loopback port, in this process."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import uvicorn

from trillion_infer.generation.generator import Generator
from trillion_infer.serve.app import create_app
from trillion_infer.serve.options import ServerOptions
from trillion_infer.serve.run import uvicorn_settings
from trillion_infer.serve.server import Server
from trillion_infer.testing.byte_tokenizer import EOS, byte_tokenizer
from trillion_infer.testing.scripted import scripted_generator

MODEL = "scripted"
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]{# <tool_call> #}"
PLAIN = byte_tokenizer(chat_template=TEMPLATE)
MARKED = byte_tokenizer(["<tool_call>", "</tool_call>"], TEMPLATE)
THINKING = byte_tokenizer(["<tool_call>", "</tool_call>", "<think>", "</think>"], TEMPLATE)


@dataclass
class Served:
    url: str
    generator: Generator
    server: Server
    uvicorn: uvicorn.Server

    def openai(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.post(self.url + path, content=content, timeout=60, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, **options)

    def check_idle(self) -> None:
        """Nothing runs, and free + cached pages are all there are."""
        engine = self.generator.engine
        for _ in range(500):
            if not engine.has_work and not self.server.jobs:
                break
            time.sleep(0.01)
        assert not engine.has_work
        assert not self.server.jobs
        engine.check_integrity()
        stats = engine.stats()
        assert stats["scripted.pages_free"] + stats["scripted.pages_cached"] == stats["scripted.pages_total"]


@contextmanager
def serving(
    script: Any, tokenizer: Any = PLAIN, options: dict | None = None, send_buffer: int | None = None, **engine: Any
) -> Iterator[Served]:
    """A running server whose model follows `script`; bytes or text end with EOS. send_buffer: of a connection."""
    if isinstance(script, str | bytes):
        script = [*(tokenizer.encode(script) if isinstance(script, str) else script), EOS]
    generator = scripted_generator(script, tokenizer, **engine)
    given = ServerOptions(**{"model_name": MODEL, **(options or {})})
    app = create_app(generator, given)
    listener = socket.socket()
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    listener.bind(("127.0.0.1", 0))
    running = uvicorn.Server(uvicorn.Config(app, **uvicorn_settings(given, drain_s=5)))
    thread = threading.Thread(target=running.run, args=([listener],), daemon=True)
    thread.start()
    while not running.started:
        time.sleep(0.005)
    try:
        yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}", generator, app.state.server, running)
    finally:
        running.should_exit = True
        thread.join(20)
        listener.close()
        assert not thread.is_alive()


def letters(index: int, prompt_len: int) -> int:
    """A script that tells prompts apart by their length."""
    return 97 + (index + prompt_len) % 26


def user(text: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]

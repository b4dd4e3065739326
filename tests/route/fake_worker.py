"""An OpenAI-compatible server without a model: answers follow from the prompt, prefixes are cached as a real one would.

    python -m tests.route.fake_worker --port=0 --token_s=0.01

prints its address. Its text is a pure function of prompt and seed, so that two workers agree.
"""

import argparse
import asyncio
import dataclasses
import hashlib
import json
import random
import socket
from collections import OrderedDict

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

BLOCK = 64


@dataclasses.dataclass
class FakeWorker:
    """Knobs that tests turn, and what the worker has seen."""

    name: str = "worker"
    token_s: float = 0.0
    cache_blocks: int = 1_000_000
    status: int = 200
    healthy: bool = True
    break_after: int | None = None
    stall_after: int | None = None
    error_event_after: int | None = None
    break_share: float = 0.0
    salt: str = ""
    requests: int = 0
    running: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    aborted: int = 0
    bodies: list = dataclasses.field(default_factory=list)
    headers: list = dataclasses.field(default_factory=list)
    rng: random.Random = dataclasses.field(default_factory=lambda: random.Random(0))
    cache: OrderedDict = dataclasses.field(default_factory=OrderedDict)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self.health),
                Route("/v1/models", self.models),
                Route("/abort", self.abort, methods=["POST"]),
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/v1/chat/completions", self.complete, methods=["POST"]),
            ]
        )

    async def health(self, _: Request) -> Response:
        return JSONResponse({}, 200 if self.healthy else 503)

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": self.name}]})

    async def abort(self, request: Request) -> Response:
        name = (await request.json())["request_id"]
        return JSONResponse({"request_id": name, "aborted": name == self.name})

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.requests += 1
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if self.status != 200:
            return JSONResponse({"error": {"message": "told to", "type": "x", "code": self.status}}, self.status)
        chat = "messages" in body
        prompt = json.dumps(body["messages"])[:-1] if chat else body["prompt"]
        words = answer_words(prompt + self.salt, body.get("max_tokens", 8))
        usage = self._usage(prompt, len(words))
        if body.get("stream"):
            return StreamingResponse(self._stream(words, usage, chat), media_type="text/event-stream")
        self.running += 1
        try:
            await asyncio.sleep(self.token_s * len(words))
        finally:
            self.running -= 1
        if self.break_after is not None:
            raise RuntimeError("told to break")
        text = "".join(words)
        content = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        choice = {"index": 0, **content, "finish_reason": "length"}
        return JSONResponse({"id": f"cmpl-{self.name}", "choices": [choice], "usage": usage})

    def _usage(self, prompt: str, output: int) -> dict:
        blocks = [prompt[: end + BLOCK] for end in range(0, len(prompt) - BLOCK + 1, BLOCK)]
        keys = [hashlib.sha256(block.encode()).digest() for block in blocks]
        hits = next((i for i, key in enumerate(keys) if key not in self.cache), len(keys))
        for key in reversed(keys):
            self.cache[key] = None
            self.cache.move_to_end(key)
        while len(self.cache) > self.cache_blocks:
            self.cache.popitem(last=False)
        self.prompt_tokens += len(prompt) // 4
        self.cached_tokens += hits * BLOCK // 4
        details = {"cached_tokens": hits * BLOCK // 4}
        return {"prompt_tokens": len(prompt) // 4, "completion_tokens": output, "prompt_tokens_details": details}

    async def _stream(self, words: list[str], usage: dict, chat: bool):
        head = {"id": f"cmpl-{self.name}-{self.requests}", "created": 1}
        done = False
        self.running += 1
        try:
            if chat:
                yield event(head | {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
            for i, word in enumerate(words):
                if i == self.break_after or self.rng.random() < self.break_share:
                    raise RuntimeError("told to break")
                if i == self.stall_after:
                    await asyncio.sleep(3600)
                if i == self.error_event_after:
                    yield event({"error": {"message": "engine died", "type": "server_error", "code": 500}})
                    return
                await asyncio.sleep(self.token_s)
                piece = {"delta": {"content": word}} if chat else {"text": word}
                reason = "length" if i == len(words) - 1 else None
                yield event(head | {"choices": [{"index": 0, **piece, "finish_reason": reason}]})
            yield event(head | {"choices": [], "usage": usage})
            yield b"data: [DONE]\n\n"
            done = True
        finally:
            self.running -= 1
            self.aborted += not done


def answer_words(prompt: str, count: int) -> list[str]:
    """The answer every worker gives to `prompt`: words of differing length."""
    seed = hashlib.sha256(prompt.encode()).hexdigest()
    return [f"{hashlib.sha256(f'{seed}{i}'.encode()).hexdigest()[: 1 + i % 5]} " for i in range(count)]


def event(value: dict) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--token_s", type=float, default=0.0)
    args = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", args.port))
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    app = FakeWorker(token_s=args.token_s).app()
    uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off")).run(sockets=[listener])


if __name__ == "__main__":
    main()

"""What every endpoint shares: the engine thread, the reader of prompts, limits and figures."""

import asyncio
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from trillion_infer.core.errors import EngineDeadError, InvalidRequestError
from trillion_infer.core.prompt_prefix import prefix_hashes, prompt_of, tenant_of
from trillion_infer.core.sampling_params import SamplingParams
from trillion_infer.engine.handoff.worker import HandoffEngine
from trillion_infer.generation.generator import Generator
from trillion_infer.generation.prompts import Prompt
from trillion_infer.serve.auth import Keys
from trillion_infer.serve.block_events import BlockEvents
from trillion_infer.serve.engine_thread import EngineThread
from trillion_infer.serve.errors import ApiError
from trillion_infer.serve.fields import parse_json
from trillion_infer.serve.jobs import Caller, Job
from trillion_infer.serve.metrics import Metrics
from trillion_infer.serve.options import ServerOptions
from trillion_infer.serve.sse import ClientGone
from trillion_infer.text.chat import ChatTemplate, chat_template
from trillion_infer.text.tokenizer import Tokenizer
from trillion_infer.text.tools import detect_reasoning_format, detect_tool_format, tool_format
from trillion_infer.text.tools.formats import REASONING_FORMATS, ReasoningFormat

T = TypeVar("T")


class Server:
    """A Generator behind HTTP. Prompts are rendered, tokenised and checked by one worker thread of their own."""

    def __init__(self, generator: Generator, options: ServerOptions):
        self.options, self.keys = options, Keys(options.api_keys)
        self.thread = EngineThread(generator)
        self.reader = generator.reader
        self.metrics = Metrics(options.model_name)
        self.draining = False
        self.generated_tokens = 0
        self.jobs: dict[str, Job] = {}
        self.blocks = BlockEvents(generator.engine.holds)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._template: ChatTemplate | None = None
        tokenizer = self.reader.tokenizer
        self.tool_format, self.reasoning = _formats(tokenizer, options)

    @property
    def tokenizer(self) -> Tokenizer:
        if self.reader.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer; send token ids to /v1/completions.")
        return self.reader.tokenizer

    @property
    def template(self) -> ChatTemplate:
        if self._template is None:
            self._template = chat_template(self.tokenizer)
        return self._template

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        """Ends the threads; what still runs gets an error."""
        self.draining = True
        self.thread.stop()
        self._worker.shutdown(wait=False, cancel_futures=True)

    def health(self) -> str | None:
        """What is wrong with the engine loop, None if it turns."""
        if self.thread.error is not None:
            return str(self.thread.error)
        if self.thread.step_seconds() > self.options.stall_s:
            return f"the step in progress has run for more than {self.options.stall_s:g} s."
        return "the server is shutting down." if self.draining else None

    async def body(self, request: HttpRequest) -> Any:
        """The JSON body of a request. Raises ApiError 400, 408 or 413."""
        limit, size, chunks = self.options.max_body_bytes, 0, []
        declared = request.headers.get("content-length", "0")
        try:
            async with asyncio.timeout(self.options.body_timeout_s):
                if declared.isdigit() and int(declared) > limit:
                    raise _too_large(limit)
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > limit:
                        raise _too_large(limit)
                    chunks.append(chunk)
        except ClientDisconnect:
            raise ClientGone from None
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self.options.body_timeout_s:g} s.") from None
        value = parse_json(b"".join(chunks))
        if isinstance(value, dict):
            prompt, _ = prompt_of(value)
            salt = tenant_of(request.headers.get("authorization", "")).encode()
            caller = request.state.caller
            request.state.caller = replace(
                caller, prefixes=tuple(prefix_hashes(prompt, salt)), prompt_bytes=len(prompt)
            )
        return value

    def check_model(self, name: str) -> None:
        """Refuses a model that is not served here."""
        if name != self.options.model_name:
            raise ApiError(
                404,
                f"model is {name!r}; this server has {self.options.model_name!r}.",
                param="model",
                code="model_not_found",
            )

    async def prepared(self, function: Callable[[], T]) -> T:
        """The value of `function`, run on the thread that reads prompts."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, function)

    async def run(
        self,
        job_id: str,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        caller: Caller,
        salt: str = "",
        session_id: str | None = None,
    ) -> Job:
        """A job whose prompts are queued, with `session_id` (of one prompt) as the next turn of that session.

        The caller ends it with `close`. Raises ApiError and library errors.
        """
        tenant = caller.tenant
        if self.draining or self.thread.error is not None:
            why = self.health() or "the server is shutting down."
            raise ApiError(503, why, code="unavailable", retry_after=self.options.retry_after_s)
        if len(self.jobs) >= self.options.max_requests:
            raise ApiError(
                429,
                f"{len(self.jobs)} requests are in flight, which is the limit; try again later.",
                code="too_many_requests",
                retry_after=self.options.retry_after_s,
            )
        if job_id in self.jobs:
            raise InvalidRequestError(f"request id {job_id!r} is in use; choose another.", param="request_id")
        prepare, whole_salt = self.thread.generator.prepare, cache_salt(tenant, salt)
        many = len(prompts) > 1
        if many and session_id is not None:
            raise InvalidRequestError(f"session_id is of one prompt, and there are {len(prompts)}.", param="session_id")

        def read() -> list[Any]:
            return [
                prepare(
                    f"{job_id}-{number}" if many else job_id,
                    prompt,
                    params,
                    cache_salt=whole_salt,
                    peers=caller.peers,
                    session_id=session_id,
                )
                for number, prompt in enumerate(prompts)
            ]

        job = Job(job_id, caller, self.thread, await self.prepared(read))
        self.jobs[job_id] = job
        try:
            await job.start()
        except BaseException:
            self.close(job)
            raise
        return job

    def close(self, job: Job) -> None:
        """Ends a job's tracking, and whatever of it still runs."""
        job.abort()
        if self.jobs.pop(job.id, None) is not None:
            self.metrics.observe(job)
            self.generated_tokens += job.tokens_so_far
            self.thread.tell(partial(self._computed, job))

    def _computed(self, job: Job) -> None:
        """Tells routers of a prompt that was computed; run by the engine's thread."""
        caller, request = job.caller, job.states[0].texts[0].request
        if len(job.states) == 1 and 0 in job.outputs and caller.prefixes:
            blocks = len(request.prompt_ids) / self.thread.generator.engine.page_size
            self.blocks.stored(caller.prefixes, request.block_names, caller.prompt_bytes, blocks)

    def abort(self, job_id: str, tenant: str) -> bool:
        """Ends a tenant's job; False for an id that is not live or somebody else's."""
        job = self.jobs.get(job_id)
        if job is None or job.caller.tenant != tenant:
            return False
        job.abort()
        return True

    @property
    def worker(self) -> HandoffEngine | None:
        """The engine, if it has a role in a pool."""
        engine = self.thread.generator.engine
        return engine if isinstance(engine, HandoffEngine) else None

    async def stats(self, timeout_s: float = 1.0) -> dict[str, int]:
        """The engine's counters; empty if it does not answer in time."""
        try:
            return await asyncio.wait_for(self.thread.call(self.thread.generator.engine.stats), timeout_s)
        except (TimeoutError, EngineDeadError):
            return {}


def cache_salt(tenant: str, salt: str) -> str:
    """What keeps the KV of a tenant apart from others', and within it what goes by another salt."""
    return f"{tenant}/{salt}" if tenant or salt else ""


def new_id(prefix: str, request_id: str | None = None) -> str:
    """An id of an answer, from the client's request id if there is one."""
    return f"{prefix}-{request_id or uuid.uuid4().hex}"


def _formats(tokenizer: Tokenizer | None, options: ServerOptions) -> tuple[str | None, ReasoningFormat | None]:
    """Names of how the model writes calls, and its reasoning format."""
    calls, reasoning = options.tool_format, options.reasoning_format
    if tokenizer is not None:
        calls = calls or detect_tool_format(tokenizer)
        reasoning = reasoning or detect_reasoning_format(tokenizer)
    calls, reasoning = (None if name == "none" else name for name in (calls, reasoning))
    if calls is not None:
        tool_format(calls)
    if reasoning is not None and reasoning not in REASONING_FORMATS:
        raise InvalidRequestError(
            f"there is no reasoning format {reasoning!r}; choose from {', '.join(REASONING_FORMATS)}, none."
        )
    return calls, None if reasoning is None else REASONING_FORMATS[reasoning]


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes; send less.", code="body_too_large")

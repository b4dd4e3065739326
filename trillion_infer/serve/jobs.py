"""One HTTP request's prompts on their way through the engine."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from trillion_infer.core.errors import EngineDeadError
from trillion_infer.core.outputs import RequestOutput
from trillion_infer.core.request import Request
from trillion_infer.generation.outputs import Delta, PromptState
from trillion_infer.serve.engine_thread import EngineThread, Item
from trillion_infer.serve.errors import ApiError

Prepared = tuple[PromptState, list[Request]]


class Job:
    """Prompts that one answer is made of. `states[i]` is prompt i; `outputs[i]` comes when it has finished."""

    def __init__(self, job_id: str, tenant: str, thread: EngineThread, prepared: Sequence[Prepared]):
        self.id, self.tenant = job_id, tenant
        self.began = time.monotonic()
        self._thread, self._prepared = thread, list(prepared)
        self._items: asyncio.Queue[tuple[int, Item]] = asyncio.Queue()
        self._submitted = 0
        self.states = [state for state, _ in self._prepared]
        self.outputs: dict[int, RequestOutput] = {}

    async def start(self) -> None:
        """Queues every prompt, or none if one is refused."""
        try:
            for number, prepared in enumerate(self._prepared):
                self._submitted = number + 1
                await self._thread.submit(prepared, partial(self._receive, number))
        except BaseException:
            self.abort()
            raise

    def _receive(self, number: int, item: Item) -> None:
        self._items.put_nowait((number, item))

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """(prompt number, delta) as they come, until every output is there."""
        while len(self.outputs) < len(self.states):
            number, item = await self._items.get()
            if isinstance(item, EngineDeadError):
                raise item
            if isinstance(item, RequestOutput):
                self.outputs[number] = item
            else:
                if item.error is not None:
                    raise item.error
                if item.finish_reason == "error":
                    raise ApiError(
                        500, "the grammar of this request gave up; simplify its schema.", code="grammar_failed"
                    )
                yield number, item

    async def finish(self) -> list[RequestOutput]:
        """The whole outputs, in the order of the prompts."""
        async for _ in self.deltas():
            pass
        return [self.outputs[number] for number in range(len(self.states))]

    def abort(self) -> None:
        """Ends what still runs; harmless after the end."""
        for number in range(self._submitted):
            if number not in self.outputs:
                self._thread.abort(self.states[number].request_id)

    def usage(self) -> dict[str, Any]:
        """Token counts of the finished job."""
        outputs = self.outputs.values()
        prompt = sum(len(output.prompt_token_ids) for output in outputs)
        completion = sum(len(each.token_ids) for output in outputs for each in output.outputs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
        }

    @property
    def prompt_tokens(self) -> int:
        return sum(len(requests[0].prompt_ids) for _, requests in self._prepared)

    @property
    def tokens_so_far(self) -> int:
        """Generated tokens of all completions."""
        return sum(len(text.output.token_ids) for state in self.states for text in state.texts)

    @property
    def max_tokens(self) -> int:
        """The largest limit in force, after the context's end was taken into account."""
        return max(request.max_tokens for _, requests in self._prepared for request in requests)

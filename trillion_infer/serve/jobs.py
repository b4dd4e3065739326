"""One HTTP request's prompts on their way through the engine."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from trillion_infer.core.errors import EngineDeadError
from trillion_infer.core.outputs import RequestOutput
from trillion_infer.core.request import Request
from trillion_infer.generation.outputs import Delta, PromptState
from trillion_infer.serve.engine_thread import EngineThread, Item
from trillion_infer.serve.errors import ApiError

Prepared = tuple[PromptState, list[Request]]


@dataclass(frozen=True)
class Caller:
    """Whose request it is, and the hand-off addresses of prefill workers that its router chose, best first.

    prefixes, prompt_bytes: names of the prompt's prefixes, as routers know them, and what they were made from.
    """

    tenant: str = ""
    peers: tuple[str, ...] = ()
    prefixes: tuple[bytes, ...] = ()
    prompt_bytes: int = 0


class Job:
    """Prompts that one answer is made of. `states[i]` is prompt i; `outputs[i]` comes when it has finished.

    at_once: where there is but one completion, takes a delta that does not end it on the event loop as soon as it is
    there, instead of `take`, if that waits; False leaves it to `take`, an error is raised by it.
    """

    def __init__(self, job_id: str, caller: Caller, thread: EngineThread, prepared: Sequence[Prepared]):
        self.id, self.caller = job_id, caller
        self.began = time.monotonic()
        self._thread, self._prepared = thread, list(prepared)
        self._items: deque[tuple[int, Item]] = deque()
        self._arrived: asyncio.Future[None] | None = None
        self._only_outputs = False
        self._submitted = 0
        self.states = [state for state, _ in self._prepared]
        self.outputs: dict[int, RequestOutput] = {}
        self.at_once: Callable[[int, Delta], bool] | None = None

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
        delta = item if isinstance(item, Delta) and item.finish_reason is None else None
        if delta is not None and self._only_outputs:
            return
        arrived = None if self._arrived is None or self._arrived.done() else self._arrived
        if delta is not None and arrived and self.at_once is not None and self._alone:
            try:
                if self.at_once(number, delta):
                    return
            except Exception as error:
                arrived.set_exception(error)
                return
        self._items.append((number, item))
        if arrived:
            arrived.set_result(None)

    async def take(self) -> list[tuple[int, Delta]]:
        """(prompt number, delta) of all that came since the last call, at least one; none once every output is there.

        Raises what ended a prompt, after the deltas before it.
        """
        while True:
            found: list[tuple[int, Delta]] = []
            while self._items:
                number, item = self._items[0]
                if isinstance(item, RequestOutput):
                    self.outputs[number] = item
                elif (error := _error_of(item)) is None:
                    found.append((number, item))  # pyright: ignore[reportArgumentType]
                elif found:
                    return found
                else:
                    raise error
                self._items.popleft()
            if found or len(self.outputs) == len(self.states):
                return found
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived

    async def finish(self) -> list[RequestOutput]:
        """The whole outputs, in the order of the prompts; deltas on the way are dropped."""
        self._only_outputs = True
        while await self.take():
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
    def _alone(self) -> bool:
        return len(self.states) == 1 and len(self.states[0].texts) == 1

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


def _error_of(item: Delta | EngineDeadError) -> Exception | None:
    if isinstance(item, EngineDeadError) or item.error is not None:
        return item if isinstance(item, EngineDeadError) else item.error
    if item.finish_reason == "error":
        return ApiError(500, "the grammar of this request gave up; simplify its schema.", code="grammar_failed")
    return None

"""The thread that owns the Generator, and how the event loop talks to it."""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from trillion_infer.core.errors import EngineDeadError, TrillionInferError
from trillion_infer.core.outputs import RequestOutput
from trillion_infer.core.request import Request
from trillion_infer.generation.generator import Generator
from trillion_infer.generation.outputs import Delta, PromptState

log = logging.getLogger("trillion_infer.serve")

_LOOP_FIRST_S = 0.005
"""How long the engine leaves the interpreter to the event loop after a step, so that tokens are written before the next
step is planned: the device has that step's predecessor to compute meanwhile. Both would wait for one lock otherwise."""
_MOST_UNWAITED = 63
"""Most steps in a row that are not waited for."""

Item = Delta | RequestOutput | EngineDeadError
"""What a prompt brings: its deltas, then its whole output; or the error that ended the engine."""

Sink = Callable[[Item], None]
"""Called on the event loop."""


class EngineThread:
    """Runs the engine apart from the event loop, so that neither stalls the other.

    Every change to the Generator is a command that this thread runs between two steps. If the thread fails, each
    waiting prompt gets the error, and so does everyone who comes later.
    """

    def __init__(self, generator: Generator):
        self.generator = generator
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._sinks: dict[str, tuple[asyncio.AbstractEventLoop, Sink]] = {}
        self._lock = threading.Lock()
        self._error: EngineDeadError | None = None
        self._stopping = False
        self._step_began: float | None = None
        self._late = self._unwaited = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self.generator.engine.wake_by(self._wake)
        self._thread.start()

    def _wake(self) -> None:
        self.tell(lambda: None)

    @property
    def error(self) -> EngineDeadError | None:
        """Why the thread has ended, None while it runs."""
        return self._error

    def step_seconds(self) -> float:
        """How long the step in progress has been running, 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    async def submit(self, prepared: tuple[PromptState, list[Request]], sink: Sink) -> None:
        """Queues a prepared prompt whose items go to `sink`. Raises what Generator.submit raises."""
        loop = asyncio.get_running_loop()

        def command() -> None:
            self.generator.submit(prepared)
            self._sinks[prepared[0].request_id] = (loop, sink)

        await self.call(command)

    def abort(self, request_id: str) -> None:
        """Ends a prompt before the next step; unknown ids and a dead engine change nothing."""
        self.tell(lambda: self._deliver(self.generator.abort(request_id)))

    def tell(self, function: Callable[[], Any]) -> None:
        """Runs `function` between two steps, if there are any more."""
        with contextlib.suppress(EngineDeadError):
            self._send(function)

    async def call(self, function: Callable[[], Any]) -> Any:
        """The value of `function`, run between two steps."""
        return await asyncio.wrap_future(self._send(function))

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the thread after the step in progress; prompts that still run get an error."""
        self._stopping = True
        try:
            self._send(lambda: None)
        except EngineDeadError:
            return
        self._thread.join(timeout_s)

    def _send(self, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._error is not None:
                raise self._error
            self._commands.put((function, future))
        return future

    def _run(self) -> None:
        error = EngineDeadError("the server is shutting down.")
        try:
            while not self._stopping:
                self._obey()
                if self.generator.has_work:
                    self._step_began = time.monotonic()
                    deltas = self.generator.step()
                    self._step_began = None
                    self._deliver(deltas)
        except Exception as cause:
            error = EngineDeadError(f"the engine stopped: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
            log.critical("the engine stopped", exc_info=cause)
        self._end(error)

    def _obey(self) -> None:
        """Runs the commands that wait; without work waits for one."""
        block = not self.generator.has_work
        while True:
            try:
                function, future = self._commands.get(block=block)
            except queue.Empty:
                return
            block = False
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except TrillionInferError as refusal:
                future.set_exception(refusal)
            except Exception as error:
                future.set_exception(EngineDeadError(f"the engine stopped: {type(error).__name__}: {error}"))
                raise

    def _deliver(self, deltas: list[Delta]) -> None:
        """Hands deltas to their sinks, with the whole output behind the last one of a prompt."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Sink, Item]]] = {}
        for delta in deltas:
            loop, sink = self._sinks[delta.request_id]
            by_loop.setdefault(loop, []).append((sink, delta))
        for request_id in dict.fromkeys(delta.request_id for delta in deltas):
            if self.generator.finished(request_id):
                loop, sink = self._sinks.pop(request_id)
                by_loop[loop].append((sink, self.generator.take(request_id)))
        for loop, items in by_loop.items():
            written = threading.Event()
            loop.call_soon_threadsafe(_give, loop, items, written)
            self._let_write(written)

    def _let_write(self, written: threading.Event) -> None:
        """Waits for the event loop, less and less often while it has more than it can write in the time."""
        if self._unwaited:
            self._unwaited -= 1
        elif written.wait(_LOOP_FIRST_S):
            self._late = 0
        else:
            self._late = min(2 * self._late + 1, _MOST_UNWAITED)
            self._unwaited = self._late

    def _end(self, error: EngineDeadError) -> None:
        with self._lock:
            self._error = error
        self._step_began = None
        for loop, sink in self._sinks.values():
            if not loop.is_closed():
                loop.call_soon_threadsafe(sink, error)
        self._sinks.clear()
        while not self._commands.empty():
            _, future = self._commands.get()
            if future.set_running_or_notify_cancel():
                future.set_exception(error)


def _give(loop: asyncio.AbstractEventLoop, items: list[tuple[Sink, Item]], written: threading.Event) -> None:
    for sink, item in items:
        sink(item)
    loop.call_soon(written.set)  # behind those whom the items have woken

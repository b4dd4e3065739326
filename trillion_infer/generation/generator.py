"""Prompts in, text deltas out: the engine with a tokenizer around it. One thread owns it."""

from collections import deque
from collections.abc import Generator as Pieces
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trillion_infer.core.errors import InvalidRequestError
from trillion_infer.core.outputs import RequestOutput
from trillion_infer.core.request import Request, Status
from trillion_infer.core.sampling_params import SamplingParams
from trillion_infer.engine.engine import Engine
from trillion_infer.engine.events import TokenEvent
from trillion_infer.generation.outputs import CompletionText, Delta, PromptState, name_tokens
from trillion_infer.generation.prompts import Prompt, PromptReader
from trillion_infer.generation.sessions import Sessions

if TYPE_CHECKING:
    from trillion_infer.engine.disaggregated import DisaggregatedEngine
    from trillion_infer.engine.handoff.worker import HandoffEngine


class Generator:
    """Tracks prompts by id from `add` until their last delta; then `take` gives the whole output once."""

    def __init__(
        self,
        engine: "Engine | DisaggregatedEngine | HandoffEngine",
        reader: PromptReader,
        sessions: Sessions | None = None,
    ):
        self.engine, self.reader = engine, reader
        self.sessions = sessions or Sessions(engine, reader.tokenizer, "")
        self._prompts: dict[str, PromptState] = {}
        self._texts: dict[Request, tuple[PromptState, CompletionText]] = {}
        self._followed: dict[str, deque[Delta]] = {}

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        peers: tuple[str, ...] = (),
        session_id: str | None = None,
    ) -> tuple[PromptState, list[Request]]:
        """Everything that can be refused about a prompt, checked, without side effects. peers: see Request.

        session_id: the session whose next turn this is; a text that goes on from its turns extends their exact ids.
        """
        if request_id in self._prompts:
            raise InvalidRequestError(f"request id {request_id!r} is in use; choose another.", param="request_id")
        text, ids = self.reader.read(prompt)
        if session_id is not None:
            ids = self.sessions.extend(session_id, cache_salt, text, ids)
            if params.n != 1:
                raise InvalidRequestError(f"A turn of a session has one answer and n is {params.n}.", param="n")
        requests = self.reader.requests(
            request_id, ids, params, priority=priority, cache_salt=cache_salt, session_id=session_id or ""
        )
        for request in requests:
            request.peers = peers
        texts = [CompletionText(request, i, self.reader.tokenizer) for i, request in enumerate(requests)]
        return PromptState(request_id, text, texts), requests

    def submit(self, prepared: tuple[PromptState, list[Request]]) -> None:
        """Queue a prepared prompt; all its completions, or none if the engine refuses one."""
        state, requests = prepared
        queued: list[Request] = []
        try:
            for request in requests:
                self.engine.add(request)
                queued.append(request)
                if request.session_id:
                    self.sessions.begin(request)
        except Exception:
            for request in queued:
                self.engine.abort(request.request_id)
                if request.session_id:
                    self.sessions.end(request, state.prompt)
            raise
        self._prompts[state.request_id] = state
        for request, text in zip(requests, state.texts, strict=True):
            self._texts[request] = (state, text)

    def add(self, request_id: str, prompt: Prompt, params: SamplingParams, **options: object) -> None:
        """`prepare` and `submit`."""
        self.submit(self.prepare(request_id, prompt, params, **options))  # pyright: ignore[reportArgumentType]

    def abort(self, request_id: str) -> list[Delta]:
        """End every completion of a prompt now; closing deltas with finish_reason "abort". Unknown ids: nothing."""
        state = self._prompts.get(request_id)
        deltas = []
        for text in state.texts if state else ():
            if text.output.finish_reason is None:
                self.engine.abort(text.request.request_id)
                rest = self._close(text.request, Status.FINISHED_ABORT, None)
                deltas.append(Delta(request_id, text.output.index, rest, [], None, "abort"))
        return deltas

    def step(self) -> list[Delta]:
        """One engine step; what it added, in order of each sequence's tokens."""
        self.sessions.tick()
        deltas = [self._receive(event) for event in self.engine.step() if event.request in self._texts]
        for delta in deltas:
            if delta.request_id in self._followed:
                self._followed[delta.request_id].append(delta)
        return deltas

    def follow(self, request_id: str) -> deque[Delta]:
        """A queue that gets every later delta of a prompt, whoever calls `step`, until `take`."""
        return self._followed.setdefault(request_id, deque())

    def _receive(self, event: TokenEvent) -> Delta:
        state, text = self._texts[event.request]
        if event.prompt_logprobs is not None:
            tokenizer = self.reader.tokenizer
            state.prompt_logprobs = [entry and name_tokens(entry, tokenizer) for entry in event.prompt_logprobs]
        shown, matched = text.push(event)
        finished, reason = event.finished, event.stop_reason
        if matched is not None:
            finished, reason = Status.FINISHED_STOP, matched
            self.engine.finish(event.request, finished, matched)
        if finished is not None:
            self._close(event.request, finished, reason)
        output = text.output
        count = len(event.token_ids)
        logprobs = output.logprobs[-count:] if output.logprobs is not None and count else None
        return Delta(
            state.request_id,
            output.index,
            shown,
            event.token_ids,
            logprobs,
            output.finish_reason,
            output.stop_reason,
            event.error,
        )

    def _close(self, request: Request, status: Status, reason: int | str | None) -> str:
        state, text = self._texts.pop(request)
        state.live -= 1
        if request.session_id:
            self.sessions.end(request, state.prompt)
        return text.close(status, reason)

    def finished(self, request_id: str) -> bool:
        """Whether every completion of a prompt has ended."""
        return self._prompts[request_id].live == 0

    def output(self, request_id: str) -> RequestOutput:
        """The output so far."""
        return self._prompts[request_id].output()

    def take(self, request_id: str) -> RequestOutput:
        """The output, and the end of its tracking."""
        self._followed.pop(request_id, None)
        return self._prompts.pop(request_id).output()


class TextStream:
    """Text of a prompt's one completion as it comes, from `Generator.add` on. `output` is the output so far, whole once
    the iterator has ended."""

    def __init__(self, generator: Generator, request_id: str):
        self._generator, self.request_id = generator, request_id
        self._output: RequestOutput | None = None
        self._deltas = generator.follow(request_id)
        self._pieces = self._run()

    @property
    def output(self) -> RequestOutput:
        return self._output if self._output is not None else self._generator.output(self.request_id)

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Ends the request, if it has not ended."""
        self._pieces.close()
        if self._output is None:
            self._end()

    def __del__(self) -> None:
        self.close()

    def _run(self) -> Pieces[str, None, None]:
        try:
            while self._deltas or not self._generator.output(self.request_id).finished:
                if not self._deltas:
                    self._generator.step()
                while self._deltas:
                    if text := self._deltas.popleft().text:
                        yield text
        finally:
            self._end()

    def _end(self) -> None:
        self._generator.abort(self.request_id)
        self._output = self._generator.take(self.request_id)

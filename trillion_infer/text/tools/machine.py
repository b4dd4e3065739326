"""One machine over token ids that tells reasoning, content and tool calls apart."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trillion_infer.text.detokenizer import IncrementalDetokenizer
from trillion_infer.text.stop import StopMatcher
from trillion_infer.text.tokenizer import Tokenizer
from trillion_infer.text.tools.context import Context
from trillion_infer.text.tools.emitter import Emitter, NewId
from trillion_infer.text.tools.events import Event
from trillion_infer.text.tools.formats import CallFormat, ReasoningFormat
from trillion_infer.text.tools.scanner import Reader, Scanner

_FIRST_SENTINEL = 0xD800


def random_call_id(name: str, index: int) -> str:
    """An id for a call whose format has none."""
    return f"call_{secrets.token_hex(12)}"


class OutputParser:
    """Feeds token ids (or text) in, gets events out; the events of every cutting assemble to the same message.

    calls: how calls are written, None to leave them as content (tool_choice "none").
    reasoning: how reasoning is marked, None if the model does not reason.
    in_reasoning: the prompt has already opened the reasoning.
    tools: the tools on offer in OpenAI's shape; None if not known.
    first_call: calls made earlier in the conversation (Kimi counts them in its ids).
    stop: applied to the text before it is read; `matched` of it tells the outcome.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        calls: CallFormat | None,
        reasoning: ReasoningFormat | None = None,
        *,
        in_reasoning: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        first_call: int = 0,
        new_id: NewId = random_call_id,
        stop: StopMatcher | None = None,
    ):
        markers = list(dict.fromkeys([*_reasoning_markers(reasoning), *(calls.markers if calls else ())]))
        added = tokenizer.added_tokens if tokenizer else {}
        tokens = [marker for marker in markers if marker in added]
        sentinels = {marker: chr(_FIRST_SENTINEL + n) for n, marker in enumerate(tokens)}
        self._scan = Scanner(sentinels)
        self._emit = Emitter(self._scan, new_id)
        self._context = Context(self._scan, self._emit, _schemas(tools), first_call)
        self._calls = calls
        self._reasoning = reasoning
        self._stop = stop
        self._tokenizer = tokenizer
        self._text_of = {added[marker]: char for marker, char in sentinels.items()}
        self._text_of |= {
            id: text for text, id in added.items() if id not in self._text_of and any(text in m for m in markers)
        }
        self._detokenizer = IncrementalDetokenizer(tokenizer) if tokenizer else None
        self._in_reasoning = False
        self._reader = self._read(in_reasoning)
        next(self._reader, None)

    def push(self, ids: Iterable[int], allow_stop: bool = True) -> list[Event]:
        """Events that `ids` complete. Special tokens that are no markers are dropped; stop strings that end in `ids`
        count if `allow_stop`."""
        assert self._detokenizer is not None
        assert self._tokenizer is not None
        parts, plain = [], []
        for id in ids:
            marker = self._text_of.get(id)
            if marker is None:
                plain.append(id)
                continue
            parts += [self._detokenizer.push(plain), self._detokenizer.finish(), marker]
            plain = []
            self._detokenizer = IncrementalDetokenizer(self._tokenizer, continuation=True)
        parts.append(self._detokenizer.push(plain))
        return self.push_text("".join(parts), allow_stop)

    def push_text(self, text: str, allow_stop: bool = True) -> list[Event]:
        """Events that `text` completes, for text that comes without ids."""
        if self._stop is not None:
            text, _ = self._stop.push(text, allow_stop)
        self._scan.push(text)
        return self._advance()

    def finish(self) -> list[Event]:
        """The last events. A call that was cut off ends as incomplete, its JSON closed."""
        tail = self._detokenizer.finish() if self._detokenizer else ""
        if self._stop is not None:
            shown, _ = self._stop.push(tail)
            tail = shown + self._stop.flush()
        self._scan.push(tail)
        self._scan.end()
        events = self._advance()
        self._emit.finish()
        return events + self._emit.take()

    @property
    def calls_made(self) -> int:
        """Calls ended so far in this message; more than none makes the finish reason `tool_calls`."""
        return self._emit.calls

    @property
    def in_reasoning(self) -> bool:
        """Whether what comes next is reasoning, as far as is known."""
        return self._in_reasoning

    def _advance(self) -> list[Event]:
        next(self._reader, None)
        return self._emit.take()

    def _read(self, in_reasoning: bool) -> Reader:
        """The whole message."""
        if in_reasoning:
            yield from self._read_reasoning()
        openers = self._calls.openers if self._calls else ()
        while True:
            if self._reasoning is not None:
                yield from self._read_leading_reasoning(self._reasoning)
            if self._calls is not None:
                yield from self._calls.start(self._context)
            opener = yield from self._until_opener(openers)
            if opener is None:
                return
            if self._calls is not None and opener in openers:
                yield from self._calls.read(self._context, opener)
            else:
                yield from self._read_reasoning()

    def _until_opener(self, openers: Sequence[str]) -> Any:
        think = self._reasoning
        if think is not None and self._scan.is_token(think.open):
            openers = (*openers, think.open)
        return (yield from self._scan.until(openers, self._emit.content))

    def _read_leading_reasoning(self, think: ReasoningFormat) -> Reader:
        """Reasoning whose opening is the first thing here but white space."""
        scan, opening = self._scan, self._scan.resolve(think.open)
        scan.set_mark()
        yield from scan.space()
        for expected in opening:
            if (yield from scan.peek()) != expected:
                scan.rewind()
                return
            yield from scan.take()
        scan.clear_mark()
        yield from self._read_reasoning()

    def _read_reasoning(self) -> Reader:
        """From inside the reasoning to behind its end, or to a call that interrupts it."""
        think, calls = self._reasoning, self._calls
        if think is None:
            return
        interrupters = calls.openers if calls is not None and calls.interrupts_reasoning else ()
        self._in_reasoning = True
        found = yield from self._scan.until((think.close, *interrupters), self._emit.reasoning)
        self._in_reasoning = False
        self._emit.end_reasoning()
        if calls is not None and found is not None and found in interrupters:
            yield from calls.read(self._context, found)


def _reasoning_markers(reasoning: ReasoningFormat | None) -> tuple[str, ...]:
    return () if reasoning is None else (reasoning.open, reasoning.close)


def _schemas(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Mapping[str, Any]] | None:
    if tools is None:
        return None
    functions = [tool.get("function", tool) for tool in tools]
    return {function["name"]: function.get("parameters") or {} for function in functions}

"""One completion of a conversation, read into reasoning, content and calls as it comes."""

from trillion_infer.generation.outputs import Delta
from trillion_infer.serve.server import Server
from trillion_infer.serve.tool_choice import ToolUse, call_format
from trillion_infer.text.stop import StopMatcher
from trillion_infer.text.tools import ContentDelta, Event, OutputParser, ReasoningDelta, tool_format


class ChoiceReader:
    """Turns deltas of one completion into events. Without calls and reasoning the text itself is the content.

    reasoning_tokens: tokens read so far from the opening of the reasoning to its end, both marks included.
    """

    def __init__(
        self,
        server: Server,
        use: ToolUse,
        *,
        in_reasoning: bool,
        calls_before: int,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ):
        format = call_format(server, use)
        self._eos = server.reader.eos_ids - server.tokenizer.special_ids
        self._no_calls = not use.offered
        self._parser = None
        self._min_tokens, self._read = min_tokens, 0
        self.reasoning_tokens = 0
        if format is not None or server.reasoning is not None:
            self._parser = OutputParser(
                server.tokenizer,
                None if format is None else tool_format(format),
                server.reasoning,
                in_reasoning=in_reasoning,
                tools=use.offered,
                first_call=calls_before,
                stop=StopMatcher(stop, include_stop),
            )

    def push(self, delta: Delta) -> list[Event]:
        """Events that a delta completes, with the last ones if it ends the completion."""
        if self._parser is None:
            return [ContentDelta(delta.text)] if delta.text else []
        events = []
        for token in self._text_ids(delta):
            self._read += 1
            thought = self._parser.in_reasoning
            events += self._parser.push((token,), allow_stop=self._read > self._min_tokens)
            self.reasoning_tokens += thought or self._parser.in_reasoning
        if delta.finish_reason is not None:
            events += self._parser.finish()
        return [e for e in events if isinstance(e, ContentDelta | ReasoningDelta)] if self._no_calls else events

    def _text_ids(self, delta: Delta) -> list[int]:
        """The ids without a token that only ended the completion."""
        ids = delta.token_ids
        if delta.finish_reason == "stop" and ids and (delta.stop_reason == ids[-1] or ids[-1] in self._eos):
            return ids[:-1]
        return ids

    @property
    def has_calls(self) -> bool:
        return self._parser is not None and not self._no_calls and self._parser.calls_made > 0

"""Token events to text: detokenising, stop strings, and outputs as the user sees them."""

from dataclasses import dataclass, field

from trillion_infer.core.outputs import CompletionOutput, Logprob, RequestOutput
from trillion_infer.core.request import Request, Status
from trillion_infer.engine.events import TokenEvent
from trillion_infer.text.detokenizer import IncrementalDetokenizer
from trillion_infer.text.stop import StopMatcher
from trillion_infer.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Delta:
    """What one step added to completion `index` of a prompt. The texts of all deltas add up to the whole text.

    error: why the completion ended with finish_reason "error", where that is known.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None


class CompletionText:
    """The text of one sequence as its tokens arrive."""

    def __init__(self, request: Request, index: int, tokenizer: Tokenizer | None):
        params = request.params
        self.request, self.tokenizer = request, tokenizer
        self.output = CompletionOutput(index, logprobs=None if params.logprobs is None else [])
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
        self._stop = StopMatcher(params.stop or (), params.include_stop_str_in_output)

    def push(self, event: TokenEvent) -> tuple[str, str | None]:
        """(text that may be shown, stop string found or None). Fills `output`."""
        output, params = self.output, self.request.params
        output.token_ids += event.token_ids
        if event.logprobs is not None and output.logprobs is not None:
            named = [self._name(entry) for entry in event.logprobs]
            output.logprobs += named
            chosen = [entry[token].logprob for entry, token in zip(named, event.token_ids, strict=True)]
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + sum(chosen)
        shown = event.token_ids
        if event.ended_by_token and not params.include_stop_str_in_output:
            shown = shown[:-1]
        text, matched = "", None
        if self._detokenizer is not None:
            early = max(0, params.min_tokens - len(output.token_ids) + len(event.token_ids))
            if early:
                text, matched = self._stop.push(self._detokenizer.push(shown[:early]), allow_match=False)
            new = self._detokenizer.push(shown[early:])
            if event.finished is not None:
                new += self._detokenizer.finish()
            late, matched = self._stop.push(new, allow_match=len(output.token_ids) > params.min_tokens)
            text += late
            if event.finished is not None and matched is None:
                text += self._stop.flush()
        output.text += text
        return text, matched

    def close(self, status: Status, stop_reason: int | str | None) -> str:
        """Ends the text; returns what was still held back (nothing after a stop string)."""
        output, rest = self.output, ""
        if output.finish_reason is None and status is Status.FINISHED_ABORT and self._detokenizer is not None:
            text, matched = self._stop.push(self._detokenizer.finish())
            rest = text if matched else text + self._stop.flush()
            output.text += rest
        output.finish_reason, output.stop_reason = status.value, stop_reason
        return rest

    def _name(self, entry: dict[int, Logprob]) -> dict[int, Logprob]:
        return name_tokens(entry, self.tokenizer)


def name_tokens(entry: dict[int, Logprob], tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """The entry with each token's text; ids outside the tokenizer have none."""
    if tokenizer is None:
        return entry
    return {
        token: Logprob(
            found.logprob, found.rank, tokenizer.decode([token], skip_special_tokens=False, continuation=True)
        )
        for token, found in entry.items()
    }


@dataclass
class PromptState:
    """A prompt on its way: its completions, and the output under construction."""

    request_id: str
    prompt: str | None
    texts: list[CompletionText]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    live: int = field(init=False)

    def __post_init__(self) -> None:
        self.live = len(self.texts)

    def output(self) -> RequestOutput:
        """The outputs so far, sharing the lists under construction."""
        first = self.texts[0].request
        return RequestOutput(
            self.request_id,
            self.prompt,
            first.prompt_ids,
            [text.output for text in self.texts],
            finished=self.live == 0,
            prompt_logprobs=self.prompt_logprobs,
            num_cached_tokens=first.num_cached_tokens,
            max_tokens=first.max_tokens,
            metrics=first.metrics,
        )

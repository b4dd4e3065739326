"""What a step brings a request."""

from dataclasses import dataclass

from trillion_infer.core.outputs import Logprob
from trillion_infer.core.request import Request, Status


@dataclass
class TokenEvent:
    """What a step brought one request. `finished` says why, if these tokens end it; with `error` there are none.

    prompt_logprobs comes with the first token of a request that asked for it.
    """

    request: Request
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: Status | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None

    @property
    def ended_by_token(self) -> bool:
        """The last token is an end-of-sequence or stop token, which is not part of the text."""
        if self.finished is not Status.FINISHED_STOP:
            return False
        last, request = self.token_ids[-1], self.request
        return last in request.eos_ids or last in (request.params.stop_token_ids or ())

    def check_end(self, count: int) -> None:
        """Says so if token number `count` ends the request: end-of-sequence, a stop token or the last allowed."""
        request, params, token = self.request, self.request.params, self.token_ids[-1]
        if token in (params.stop_token_ids or ()):
            self.finished, self.stop_reason = Status.FINISHED_STOP, token
        elif (token in request.eos_ids and not params.ignore_eos) or (
            request.grammar is not None and request.grammar.is_complete
        ):
            self.finished = Status.FINISHED_STOP
        if self.finished is None and count >= request.max_tokens:
            self.finished = Status.FINISHED_LENGTH

"""What a request gives back. Names and meanings follow vLLM's RequestOutput."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Logprob:
    """Natural-log probability of one token at one position; rank 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str = ""


@dataclass
class CompletionOutput:
    """One of the n answers. `logprobs[i]` maps token id to Logprob at generated position i."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class HandoffMarks:
    """Marks of a prompt that another worker prefilled, in seconds of `time.monotonic()`; None until reached.

    reserved: its pages were. offered: the last of them was computed. arrived: the last of them was in place.
    transfer_s: seconds in which pages were on their way; bytes: how many there were.
    """

    reserved: float | None = None
    offered: float | None = None
    arrived: float | None = None
    transfer_s: float = 0.0
    bytes: int = 0

    @property
    def exposed_s(self) -> float | None:
        """Seconds that the request waited for pages after its prefill had ended."""
        return None if self.arrived is None or self.offered is None else max(0.0, self.arrived - self.offered)


@dataclass
class DraftFigures:
    """What one drafter gave. drafts: verified drafts of at least one token."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Share of drafted tokens that stood; 0 before any."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_length(self) -> float:
        """Mean tokens that one verification gave, the verifier's own included; 1 before any."""
        return 1.0 + (self.accepted / self.drafts if self.drafts else 0.0)

    def record(self, drafted: int, accepted: int) -> None:
        """One verified draft of `drafted` tokens, of which `accepted` stood."""
        self.drafts += 1
        self.drafted += drafted
        self.accepted += accepted


@dataclass
class RequestMetrics:
    """Wall-clock marks, in seconds of `time.monotonic()`; None until reached. drafts: by drafter, what they gave."""

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    token_times: list[float] = field(default_factory=list)
    preemptions: int = 0
    handoff: HandoffMarks | None = None
    drafts: dict[str, DraftFigures] = field(default_factory=dict)

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass
class RequestOutput:
    """A prompt with its answers.

    num_cached_tokens: prompt tokens whose KV was found instead of computed, at most len(prompt_token_ids) - 1.
    max_tokens: the limit in force, after the context's end was taken into account.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    max_tokens: int = 0
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

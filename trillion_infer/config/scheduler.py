"""Limits of the scheduler."""

from dataclasses import dataclass

from trillion_infer.core.errors import ConfigError


@dataclass(frozen=True)
class SchedulerConfig:
    """What one step may hold.

    max_running: requests with a slot; slots are 0 .. max_running - 1.
    max_batch_tokens: query tokens of one step, decode, verification and prefill together.
    prefill_chunk: prefill tokens of one step, all requests together.
    max_model_len: prompt and answer of one request, in tokens.
    max_waiting: requests that may queue; None for no limit. Preempted requests return to the queue regardless.
    chunked_prefill: False computes a prompt in one step, unless the pages of a window forbid it.
    expected_output: answer length assumed before any request has finished, in tokens.
    """

    max_running: int
    max_batch_tokens: int
    prefill_chunk: int
    max_model_len: int
    max_waiting: int | None = None
    chunked_prefill: bool = True
    expected_output: int = 256

    def __post_init__(self) -> None:
        for field, low in (
            ("max_running", 1),
            ("max_batch_tokens", 1),
            ("prefill_chunk", 1),
            ("max_model_len", 2),
            ("expected_output", 1),
        ):
            value = getattr(self, field)
            if value < low:
                raise ConfigError(f"{field} is {value}; it must be at least {low}.")
        if self.max_waiting is not None and self.max_waiting < 1:
            raise ConfigError(f"max_waiting is {self.max_waiting}; it must be None (no limit) or at least 1.")
        if self.max_batch_tokens < self.max_running:
            raise ConfigError(
                f"max_batch_tokens is {self.max_batch_tokens}, less than max_running, {self.max_running}: "
                "a step could not hold one token of each request; raise the first or lower the second."
            )
        if not self.chunked_prefill and self.max_batch_tokens < self.max_model_len + self.max_running:
            raise ConfigError(
                f"max_batch_tokens is {self.max_batch_tokens}; without chunked_prefill a step must hold a whole prompt "
                f"and one token of each request: {self.max_model_len} + {self.max_running}. Raise it or allow chunks."
            )

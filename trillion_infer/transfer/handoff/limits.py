"""Times and sizes of a hand-off."""

import dataclasses
import re

from trillion_infer.core.errors import ConfigError

POLICIES = ("recompute", "fail")


@dataclasses.dataclass(frozen=True)
class HandoffLimits:
    """How long a hand-off may take, and what follows one that fails.

    Args:
        on_transfer_failure: `recompute` prefills on the decode worker itself what no prefill worker could hand over;
            `fail` ends the request with an error.
        lease_s: seconds without a word from the asker after which a prefill worker frees what it holds for it.
        beat_s: seconds between two signs of life.
        silence_s: seconds without a sign of life after which a decode worker asks another prefill worker.
        deadline_s: seconds from the arrival of a request until its KV is there or the policy is applied.
        max_attempts: prefill workers asked for one request.
        max_queued_tokens: prompt tokens in a prefill worker's queue above which it takes no more.
    """

    on_transfer_failure: str = "recompute"
    lease_s: float = 20.0
    beat_s: float = 1.0
    silence_s: float = 10.0
    deadline_s: float = 120.0
    max_attempts: int = 4
    max_queued_tokens: int = 262_144

    def __post_init__(self) -> None:
        if self.on_transfer_failure not in POLICIES:
            raise ConfigError(
                f"on_transfer_failure is {self.on_transfer_failure!r}; it must be one of {', '.join(POLICIES)}."
            )
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, str) and not 0 < value < float("inf"):
                raise ConfigError(f"{field.name} is {value!r}; it must be above 0.")
        if not self.beat_s < self.silence_s or not self.beat_s < self.lease_s:
            raise ConfigError(
                f"beat_s is {self.beat_s}, silence_s {self.silence_s} and lease_s {self.lease_s}; the first must be "
                "the smallest, or workers that live are taken for dead."
            )


def limits_help() -> dict[str, str]:
    """What each limit means, from the docstring of HandoffLimits."""
    lines = re.sub(r"\n {12}", " ", (HandoffLimits.__doc__ or "").partition("Args:")[2]).splitlines()
    found = dict(line.strip().split(": ", 1) for line in lines if ": " in line)
    return {name: text[0].upper() + text[1:] for name, text in found.items()}

"""What a drafter is asked and what it answers."""

import abc
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field


@dataclass
class DraftRequest:
    """One running request, as drafters see it; filled by the engine.

    request_id: names the request until `Drafter.release`. tokens: prompt and output so far; the same list grows from
    step to step. tenant: requests of different tenants never see each other's tokens. forced: the next tokens that
    an active grammar leaves no choice about, at most as many as asked; None without a grammar.
    """

    request_id: Hashable
    tokens: Sequence[int]
    tenant: str = ""
    forced: Callable[[int], Sequence[int]] | None = None


@dataclass(frozen=True)
class Draft:
    """Proposed tokens, each with the estimated probability that it stands, given that those before it do."""

    tokens: tuple[int, ...] = ()
    confidence: tuple[float, ...] = field(default=())
    drafter: str = ""

    @property
    def expected(self) -> float:
        """Tokens that will stand, as estimated."""
        total, chance = 0.0, 1.0
        for each in self.confidence:
            chance *= each
            total += chance
        return total

    def first(self, count: int) -> "Draft":
        """The draft cut to `count` tokens."""
        return Draft(self.tokens[:count], self.confidence[:count], self.drafter)


NOTHING = Draft()


class Drafter(abc.ABC):
    """Proposes tokens for requests. Never has the last word: a wrong draft costs time, not correctness."""

    name: str

    @abc.abstractmethod
    def propose(self, requests: Sequence[DraftRequest], k: int) -> list[Draft]:
        """A draft of at most k tokens for each request, possibly empty."""

    def release(self, request: DraftRequest) -> None:  # noqa: B027  most drafters that keep nothing need nothing here
        """The request ended; its final tokens may serve later requests of its tenant."""

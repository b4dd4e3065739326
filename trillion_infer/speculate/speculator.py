"""What the engine holds: drafters, what was accepted, what steps cost, and from these the drafts of the next step."""

from collections.abc import Hashable, Sequence

from trillion_infer.core.errors import ConfigError
from trillion_infer.speculate.adaptive import Acceptance, StepCost, allot, can_pay
from trillion_infer.speculate.base import NOTHING, Draft, Drafter, DraftRequest
from trillion_infer.speculate.stats import SpeculationStats

MAX_DRAFTS = 16


class Speculator:
    """Chooses the drafts of each step. Several drafters may be on: each request gets the most promising draft.

    max_drafts: tokens per request and step, 1 to 16. cost: shared with the engine, which records every step in it.
    """

    def __init__(self, drafters: Sequence[Drafter], cost: StepCost, max_drafts: int = 7):
        if not 1 <= max_drafts <= MAX_DRAFTS:
            raise ConfigError(f"The draft length is {max_drafts}; it must be from 1 to {MAX_DRAFTS}.")
        self._drafters, self._cost, self._max_drafts = list(drafters), cost, max_drafts
        self._acceptance = Acceptance()
        self.stats = SpeculationStats()

    def propose(self, requests: Sequence[DraftRequest], base_tokens: int, limits: Sequence[int]) -> list[Draft]:
        """Drafts to verify in a step that has `base_tokens` query tokens without them; empty where none pays.

        limits: for each request, the most drafts that its length still allows (max_tokens, context, pages).
        """
        limits = [min(limit, self._max_drafts) for limit in limits]
        if not requests or not can_pay(limits, base_tokens, self._cost):
            return [NOTHING] * len(requests)
        drafts = self._best(requests, limits)
        chances = [self._acceptance.chances(r.request_id, draft) for r, draft in zip(requests, drafts, strict=True)]
        lengths = allot(chances, base_tokens, self._cost)
        for request, draft, length in zip(requests, drafts, lengths, strict=True):
            if draft.tokens and not length:
                self._acceptance.rest(request.request_id, draft.drafter)
        return [draft.first(length) if length else NOTHING for draft, length in zip(drafts, lengths, strict=True)]

    def would_pay(self, name: str, request_ids: Sequence[Hashable], count: int, confidence: float) -> bool:
        """Whether full drafts of this drafter, each token as likely as `confidence` says, are worth their cost to
        some of `count` requests, of which the last may be new."""
        draft = Draft((0,) * self._max_drafts, (confidence,) * self._max_drafts, name)
        ids = [*request_ids[:count], *[None] * (count - len(request_ids))]
        if any(allot([self._acceptance.chances(each, draft) for each in ids], count, self._cost)):
            return True
        for request_id in request_ids:
            self._acceptance.rest(request_id, name)
        return False

    def record(self, request: DraftRequest, draft: Draft, num_tokens: int) -> None:
        """The verifier gave `num_tokens` tokens for this draft: all but the last are drafts that stood."""
        if draft.tokens and num_tokens > 0:
            self._acceptance.record(request.request_id, draft, num_tokens - 1)
            self.stats.record(draft, num_tokens - 1)

    def release(self, request: DraftRequest) -> None:
        """The request ended or was aborted."""
        self._acceptance.release(request.request_id)
        for drafter in self._drafters:
            drafter.release(request)

    def _best(self, requests: Sequence[DraftRequest], limits: Sequence[int]) -> list[Draft]:
        best = [NOTHING] * len(requests)
        gains = [0.0] * len(requests)
        for drafter in self._drafters:
            for place, draft in enumerate(drafter.propose(requests, self._max_drafts)):
                draft = draft.first(limits[place])
                gain = sum(self._acceptance.chances(requests[place].request_id, draft))
                if gain > gains[place]:
                    best[place], gains[place] = draft, gain
        return best

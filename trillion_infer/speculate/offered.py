"""Drafts that a model made on the device after the step before."""

from collections.abc import Hashable, Sequence

from trillion_infer.speculate.base import NOTHING, Draft, Drafter, DraftRequest


class OfferedDrafter(Drafter):
    """Holds what a model drafted until it is asked for. A draft serves a text of exactly the length it was made for.

    expected: how sure of a token the model was of late, for deciding whether to run it at all.
    """

    def __init__(self, name: str, expected: float = 0.7, weight: float = 0.05):
        self.name, self.expected, self._weight = name, expected, weight
        self._offers: dict[Hashable, tuple[int, Draft]] = {}

    def offer(self, request_id: Hashable, length: int, tokens: Sequence[int], chances: Sequence[float]) -> None:
        """Drafts for the places from `length` on, each with the probability that the model gave it."""
        self._offers[request_id] = length, Draft(tuple(tokens), tuple(chances), self.name)
        self.expected += self._weight * (sum(chances) / len(chances) - self.expected)

    def propose(self, requests: Sequence[DraftRequest], k: int) -> list[Draft]:
        drafts = []
        for request in requests:
            length, draft = self._offers.get(request.request_id, (-1, NOTHING))
            drafts.append(draft.first(k) if length == len(request.tokens) else NOTHING)
        return drafts

    def release(self, request: DraftRequest) -> None:
        self._offers.pop(request.request_id, None)

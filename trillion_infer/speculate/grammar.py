"""Tokens that a grammar forces, as drafts: the model still computes their KV, and the verifier its own word."""

from collections.abc import Sequence

from trillion_infer.speculate.base import NOTHING, Draft, Drafter, DraftRequest


class GrammarDrafter(Drafter):
    """Asks each request's grammar for the tokens it leaves no choice about."""

    name = "grammar"

    def propose(self, requests: Sequence[DraftRequest], k: int) -> list[Draft]:
        return [self._propose(request, k) for request in requests]

    def _propose(self, request: DraftRequest, k: int) -> Draft:
        if request.forced is None or k < 1:
            return NOTHING
        tokens = tuple(request.forced(k))[:k]
        return Draft(tokens, (1.0,) * len(tokens), self.name)

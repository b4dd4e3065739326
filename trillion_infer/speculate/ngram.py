"""Prompt lookup: what followed the last time the newest tokens occurred in this request (arXiv 2304.04487)."""

from array import array
from collections.abc import Hashable, Sequence

from trillion_infer.speculate.base import NOTHING, Draft, Drafter, DraftRequest

_SHIFT = 24  # ids are below 2^24: the tokens of an n-gram fit in one integer without collision


class NgramIndex:
    """Where each n-gram of a growing text ended, newest first. Constant work per token."""

    def __init__(self, size: int):
        self._size = size
        self._newest: dict[int, int] = {}
        self._older = array("q")  # for each position, the previous end of the n-gram that ends there; -1 for none
        self._key = 0
        self._mask = (1 << (_SHIFT * size)) - 1

    def __len__(self) -> int:
        return len(self._older)

    def extend(self, tokens: Sequence[int], limit: int) -> bool:
        """Index up to `limit` tokens that are new in this text; True once all are."""
        end = min(len(tokens), len(self) + limit)
        for position in range(len(self), end):
            self._key = ((self._key << _SHIFT) | tokens[position]) & self._mask
            if position + 1 < self._size:
                self._older.append(-1)
                continue
            self._older.append(self._newest.get(self._key, -1))
            self._newest[self._key] = position
        return end == len(tokens)

    def match(self, tokens: Sequence[int], *, longest: int, tries: int) -> tuple[int, int]:
        """(position after the best earlier occurrence of the text's end, tokens in common), or (-1, 0).

        Looks at the `tries` newest occurrences of the last n-gram and counts up to `longest` tokens of each.
        """
        best, best_length = -1, 0
        last = len(self) - 1
        earlier = self._older[last] if last >= 0 else -1
        while earlier >= 0 and tries > 0:
            length = self._size
            while length < longest and length <= earlier and tokens[earlier - length] == tokens[last - length]:
                length += 1
            if length > best_length:
                best, best_length = earlier + 1, length
            if length == longest:
                break
            earlier, tries = self._older[earlier], tries - 1
        return best, best_length


class NgramDrafter(Drafter):
    """Copies what followed the best earlier match of the newest tokens in the same request.

    size: tokens that must match at least. tries: occurrences looked at. per_step: tokens indexed in one call, so that
    a long prompt does not hold up a step; until its index is complete a request gets no drafts.
    """

    name = "ngram"

    def __init__(self, size: int = 2, longest: int = 16, tries: int = 16, per_step: int = 16_384):
        self._size, self._longest, self._tries, self._per_step = size, longest, tries, per_step
        self._indexes: dict[Hashable, NgramIndex] = {}

    def propose(self, requests: Sequence[DraftRequest], k: int) -> list[Draft]:
        return [self._propose(request, k) for request in requests]

    def release(self, request: DraftRequest) -> None:
        self._indexes.pop(request.request_id, None)

    def _propose(self, request: DraftRequest, k: int) -> Draft:
        index = self._indexes.get(request.request_id)
        if index is None:
            index = self._indexes[request.request_id] = NgramIndex(self._size)
        if not index.extend(request.tokens, self._per_step) or k < 1:
            return NOTHING
        start, length = index.match(request.tokens, longest=self._longest, tries=self._tries)
        if start < 0:
            return NOTHING
        tokens = _copy(request.tokens, start, k)
        # the longer the match, the likelier that it goes on: a prior that `Acceptance` corrects by what happens
        return Draft(tokens, (1.0 - 1.0 / (1.0 + length),) * len(tokens), self.name)


def _copy(tokens: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """`count` tokens from `start`; where the text ends, the copy goes on with itself (a loop repeats)."""
    copied = list(tokens[start : start + count])
    while len(copied) < count:
        copied.append(copied[len(copied) - (len(tokens) - start)])
    return tuple(copied)

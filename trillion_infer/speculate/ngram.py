"""Prompt lookup: what followed where the newest tokens occurred before in this request (arXiv 2304.04487).

An edit, or the same thing written in another form, agrees with its source but for a token here and there. So a place in
the text is not given up at the first token that differs: it loses weight, and goes on behind it.
"""

from array import array
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence

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

    def earlier(self, position: int, most: int) -> Iterator[int]:
        """Positions before this one at which the n-gram that ends here ended, newest first, at most `most`."""
        position = self._older[position]
        while position >= 0 and most > 0:
            yield position
            position, most = self._older[position], most - 1


class Alignment:
    """Places of a text that its end may be a copy of, each with a weight: how many tokens agreed, those further back
    counting less. A place is the position of the token that would come next."""

    DECAY, FAULT, LEAST, KEPT = 0.85, 0.5, 0.3, 12
    SKIPPED = 5
    SEEDS = ((1, 3), (2, 6), (4, 6))
    """Sizes of n-grams whose earlier ends become places, and how many of the newest."""

    def __init__(self) -> None:
        self._indexes = [(NgramIndex(size), most) for size, most in self.SEEDS]
        self._seeded = [sum(self.DECAY**i for i in range(size)) for size, _ in self.SEEDS]
        self._places: dict[int, float] = {}
        self._done = 0

    def extend(self, tokens: Sequence[int], limit: int, back: int = 48) -> bool:
        """Take in up to `limit` new tokens; True once all are. Of many only the last `back` move places."""
        if not all([index.extend(tokens, limit) for index, _ in self._indexes]):
            return False
        for position in range(max(self._done, len(tokens) - back), len(tokens)):
            self._move(tokens, position)
        self._done = len(tokens)
        return True

    def best(self) -> tuple[int, float]:
        """The place of most weight, of those the newest; (-1, 0) if there is none."""
        return max(self._places.items(), key=lambda item: (item[1], item[0]), default=(-1, 0.0))

    def _move(self, tokens: Sequence[int], position: int) -> None:
        """Every place one token on: the token at `position` has come."""
        new: dict[int, float] = {}

        def put(place: int, weight: float) -> None:
            if place <= position and weight > new.get(place, 0.0):
                new[place] = weight

        token = tokens[position]
        for place, weight in self._places.items():
            weight *= self.DECAY
            if tokens[place] == token:
                put(place + 1, weight + 1)
                continue
            weight *= self.FAULT
            if weight < self.LEAST:
                continue
            put(place, weight)  # it stands between
            put(place + 1, weight)  # it stands in place of another
            ahead = range(place + 1, min(place + self.SKIPPED, position))
            after = next((each for each in ahead if tokens[each] == token), None)
            if after is not None:
                put(after + 1, weight + 1)  # others were left out
        for (index, most), weight in zip(self._indexes, self._seeded, strict=True):
            for end in index.earlier(position, most):
                put(end + 1, weight)
        if len(new) > self.KEPT:
            new = dict(sorted(new.items(), key=lambda item: (item[1], item[0]))[-self.KEPT :])
        self._places = new


class NgramDrafter(Drafter):
    """Copies what followed the place of the same request that its newest tokens agree with best.

    per_step: tokens indexed in one call, so that a long prompt does not hold up a step; until its index is complete a
    request gets no drafts.
    """

    name = "ngram"

    def __init__(self, per_step: int = 16_384):
        self._per_step = per_step
        self._alignments: defaultdict[Hashable, Alignment] = defaultdict(Alignment)

    def propose(self, requests: Sequence[DraftRequest], k: int) -> list[Draft]:
        return [self._propose(request, k) for request in requests]

    def release(self, request: DraftRequest) -> None:
        self._alignments.pop(request.request_id, None)

    def _propose(self, request: DraftRequest, k: int) -> Draft:
        alignment = self._alignments[request.request_id]
        if not alignment.extend(request.tokens, self._per_step) or k < 1:
            return NOTHING
        place, weight = alignment.best()
        if place < 0:
            return NOTHING
        confidence = []
        for _ in range(k):  # what agreed longest is likeliest to go on: a prior that `Acceptance` corrects
            confidence.append(weight / (weight + 1))
            weight = weight * Alignment.DECAY + 1
        return Draft(_copy(request.tokens, place, k), tuple(confidence), self.name)


def _copy(tokens: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """`count` tokens from `start`; where the text ends, the copy goes on with itself (a loop repeats)."""
    copied = list(tokens[start : start + count])
    while len(copied) < count:
        copied.append(copied[len(copied) - (len(tokens) - start)])
    return tuple(copied)

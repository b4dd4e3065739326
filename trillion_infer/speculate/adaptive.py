"""How many drafts to verify, from what was accepted so far and what a step costs. Plain Python, no clock of its own."""

import bisect
import heapq
from collections.abc import Hashable, Sequence

from trillion_infer.speculate.base import Draft


class StepCost:
    """Measured seconds of a step by its number of query tokens, in the engine's buckets.

    A bucket never measured is taken to cost what the largest measured one below it does, so that it gets tried.
    """

    def __init__(self, buckets: Sequence[int], weight: float = 0.2):
        self._buckets = sorted(buckets)
        self._weight = weight
        self._seconds: dict[int, float] = {}

    def record(self, tokens: int, seconds: float) -> None:
        """One step without compilation took so long."""
        bucket = self.bucket(tokens)
        known = self._seconds.get(bucket, seconds)
        self._seconds[bucket] = known + self._weight * (seconds - known)

    def bucket(self, tokens: int) -> int:
        """Query tokens that a step of this size is padded to."""
        place = bisect.bisect_left(self._buckets, tokens)
        return self._buckets[min(place, len(self._buckets) - 1)]

    def estimate(self, tokens: int) -> float | None:
        """Seconds of such a step; None before anything near was measured."""
        below = [bucket for bucket in self._seconds if bucket <= self.bucket(tokens)]
        return max(self._seconds[bucket] for bucket in below) if below else None


class Acceptance:
    """How often each drafter's tokens stand, per request, against what the drafter expected.

    One factor on the drafter's confidence, near 1 when it knows itself. It drifts back to where it started while
    nothing is drafted, so that a request is tried again after its text has changed.
    """

    def __init__(self, start: float = 1.0, weight: float = 0.15, recovery: float = 0.01):
        self._start, self._weight, self._recovery = start, weight, recovery
        self._factors: dict[tuple[Hashable, str], float] = {}

    def factor(self, request_id: Hashable, drafter: str) -> float:
        return self._factors.get((request_id, drafter), self._start)

    def record(self, request_id: Hashable, draft: Draft, accepted: int) -> None:
        """`accepted` of the draft's tokens stood. Those after the first that fell say nothing."""
        key = request_id, draft.drafter
        factor = self.factor(*key)
        for place, expected in enumerate(draft.confidence[: accepted + 1]):
            ratio = (1.0 if place < accepted else 0.0) / max(expected, 0.05)
            factor += self._weight * (min(ratio, 2.0) - factor)
        self._factors[key] = factor

    def rest(self, request_id: Hashable, drafter: str) -> None:
        """A draft was at hand and not used."""
        factor = self.factor(request_id, drafter)
        self._factors[request_id, drafter] = factor + self._recovery * (self._start - factor)

    def release(self, request_id: Hashable) -> None:
        for key in [key for key in self._factors if key[0] == request_id]:
            del self._factors[key]

    def chances(self, request_id: Hashable, draft: Draft) -> list[float]:
        """Probability that each token of the draft is reached and stands."""
        factor, chance, chances = self.factor(request_id, draft.drafter), 1.0, []
        for each in draft.confidence:
            chance *= min(0.99, each * factor)
            chances.append(chance)
        return chances


def allot(chances: Sequence[Sequence[float]], base_tokens: int, cost: StepCost, margin: float = 1.03) -> list[int]:
    """Draft lengths, one per request, with the most tokens per second; all 0 unless that gains by `margin`.

    chances: for each request, the falling probabilities that its drafted tokens stand. base_tokens: query tokens of
    the step without drafts, which yield one token for each request.
    """
    lengths = [0] * len(chances)
    alone = cost.estimate(base_tokens)
    if alone is None or not chances:
        return lengths
    best, best_lengths = margin * len(chances) / alone, list(lengths)
    heap = [(-each[0], request) for request, each in enumerate(chances) if each]
    heapq.heapify(heap)
    gained, used = float(len(chances)), base_tokens
    while heap:
        negative, request = heapq.heappop(heap)
        gained -= negative
        used += 1
        lengths[request] += 1
        if lengths[request] < len(chances[request]):
            heapq.heappush(heap, (-chances[request][lengths[request]], request))
        seconds = cost.estimate(used)
        if seconds is not None and gained / seconds > best:
            best, best_lengths = gained / seconds, list(lengths)
    return best_lengths

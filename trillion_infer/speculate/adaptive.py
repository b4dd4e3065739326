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

    def full(self, base: int, most: int) -> list[int]:
        """Query tokens above `base`, up to `most`, to which one more would make the step another, and `most`."""
        return [*(size for size in self._buckets if base < size < most), most]


class Calibration:
    """How often tokens stood of which a drafter was so sure, over all requests.

    What it said counts like `prior` tokens seen; older tokens count less and less, so that at most `memory` count.
    """

    CLASSES = 10

    def __init__(self, prior: float = 4.0, memory: float = 200.0):
        self._prior, self._memory = prior, memory
        self._seen: dict[tuple[str, int], tuple[float, float]] = {}

    def chance(self, drafter: str, confidence: float) -> float:
        """Probability that such a token stands."""
        stood, count = self._seen.get(self._key(drafter, confidence), (0.0, 0.0))
        return (confidence * self._prior + stood) / (self._prior + count)

    def record(self, drafter: str, confidence: float, stands: bool) -> None:
        key = self._key(drafter, confidence)
        stood, count = self._seen.get(key, (0.0, 0.0))
        kept = 1 - 1 / self._memory
        self._seen[key] = stood * kept + stands, count * kept + 1

    def _key(self, drafter: str, confidence: float) -> tuple[str, int]:
        return drafter, min(int(confidence * self.CLASSES), self.CLASSES - 1)


class Acceptance:
    """How often each drafter's tokens stand: what its confidence meant so far, and per request against that.

    A request has one factor, near 1 when it is like the others: tokens that stood to those expected to, of late. It
    drifts back to 1 while nothing is drafted, so that a request is tried again after its text has changed.
    """

    def __init__(self, prior: float = 2.0, memory: float = 20.0, recovery: float = 0.02):
        self._prior, self._kept, self._resting = prior, 1 - 1 / memory, 1 - recovery
        self._sums: dict[tuple[Hashable, str], tuple[float, float]] = {}
        self._calibration = Calibration()

    def factor(self, request_id: Hashable, drafter: str) -> float:
        stood, expected = self._sums.get((request_id, drafter), (0.0, 0.0))
        return (self._prior + stood) / (self._prior + expected)

    def record(self, request_id: Hashable, draft: Draft, accepted: int) -> None:
        """`accepted` of the draft's tokens stood. Those after the first that fell say nothing."""
        key = request_id, draft.drafter
        stood, expected = self._sums.get(key, (0.0, 0.0))
        for place, confidence in enumerate(draft.confidence[: accepted + 1]):
            stands = place < accepted
            expected = expected * self._kept + self._calibration.chance(draft.drafter, confidence)
            stood = stood * self._kept + stands
            self._calibration.record(draft.drafter, confidence, stands)
        self._sums[key] = stood, expected

    def rest(self, request_id: Hashable, drafter: str) -> None:
        """A draft was at hand and not used."""
        stood, expected = self._sums.get((request_id, drafter), (0.0, 0.0))
        self._sums[request_id, drafter] = stood * self._resting, expected * self._resting

    def release(self, request_id: Hashable) -> None:
        for key in [key for key in self._sums if key[0] == request_id]:
            del self._sums[key]

    def chances(self, request_id: Hashable, draft: Draft) -> list[float]:
        """Probability that each token of the draft is reached and stands."""
        factor, chance, chances = self.factor(request_id, draft.drafter), 1.0, []
        for each in draft.confidence:
            chance *= min(0.99, self._calibration.chance(draft.drafter, each) * factor)
            chances.append(chance)
        return chances


MARGIN = 1.03
"""Tokens per second that drafts must give, of those without."""


def can_pay(limits: Sequence[int], base_tokens: int, cost: StepCost) -> bool:
    """Whether drafts of these lengths would be worth their cost if every token stood: little work, so asked first."""
    alone, count, most = cost.estimate(base_tokens), len(limits), sum(limits)
    if alone is None or not most:
        return False
    for tokens in cost.full(base_tokens, base_tokens + most):
        seconds = cost.estimate(tokens)
        if seconds is not None and (count + tokens - base_tokens) * alone > MARGIN * count * seconds:
            return True
    return False


def allot(chances: Sequence[Sequence[float]], base_tokens: int, cost: StepCost, margin: float = MARGIN) -> list[int]:
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

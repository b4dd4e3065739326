"""How long answers turn out to be, learned from those that finished."""

from bisect import bisect_right, insort
from collections import deque


class OutputLengths:
    """Lengths of the last finished answers, and the mean of those longer than a given length.

    prior: assumed length before anything finished, in tokens; it counts as `PRIOR_WEIGHT` answers.
    """

    PRIOR_WEIGHT = 4
    MEMORY = 256

    def __init__(self, prior: int):
        self._prior = prior
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self._tail_sums: list[int] | None = None

    def record(self, length: int) -> None:
        self._recent.append(length)
        insort(self._sorted, length)
        if len(self._recent) > self.MEMORY:
            oldest = self._recent.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
        self._tail_sums = None

    def expected(self, so_far: int, limit: int) -> int:
        """Expected final length, in (so_far, limit], of an answer that has `so_far` tokens and goes on.

        An answer longer than all that were seen is expected to double.
        """
        sums = self._sums()
        first = bisect_right(self._sorted, so_far)
        count, total = len(self._sorted) - first, sums[first]
        if self._prior > so_far:
            count, total = count + self.PRIOR_WEIGHT, total + self.PRIOR_WEIGHT * self._prior
        guess = -(-total // count) if count else 2 * so_far
        return min(limit, max(guess, so_far + 1))

    def _sums(self) -> list[int]:
        """sums[i] = sum of the sorted lengths from i on."""
        if self._tail_sums is None:
            sums = [0]
            for length in reversed(self._sorted):
                sums.append(sums[-1] + length)
            self._tail_sums = sums[::-1]
        return self._tail_sums

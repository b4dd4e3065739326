"""Which way a prefix had better come back: as whole blocks, or by layers with its request computing meanwhile."""

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

LEAST_GAIN_SECONDS = 0.002
"""What running by layers must save at best to be worth its further calls."""
RETRY_SECONDS = 60.0
"""How long the way that was slower is not tried again; what was measured before that does not count any more."""
NEW_SHARE = 0.3
"""Weight of the newest measurement."""


@dataclass
class _Measured:
    """share: of what reading and then computing was expected to take. tried: when it was last begun."""

    share: float | None = None
    tried: float = -float("inf")


class Ways:
    """Chooses by what both ways took lately with each tier, in shares of reading and computing one after the other.

    Reading beside computing saves the shorter of both where they share nothing. Where both want the same cores (a step
    on a CPU, and the digests of what is read from memory) it may cost more than it saves, so it is measured.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._measured: dict[tuple[str, bool], _Measured] = {}
        self._running: dict[Hashable, tuple[_Measured, float, float]] = {}

    def by_layers(self, tier: str, read: float, compute: float, parts: int) -> bool:
        """Whether to run by layers, in `parts`, while reading from a tier; seconds that reading and computing take."""
        if min(read, compute) * (1 - 1 / parts) <= LEAST_GAIN_SECONDS:
            return False
        layers, whole = self._of(tier, True), self._of(tier, False)
        if layers.share is None or whole.share is None:
            return layers.share is None
        better, worse = (layers, whole) if layers.share <= whole.share else (whole, layers)
        return (worse if self._clock() - worse.tried > RETRY_SECONDS else better) is layers

    def begin(self, request: Hashable, tier: str, by_layers: bool, expected: float) -> None:
        """A request's prefix starts to be read, with nothing else to do; reading and then computing would take
        `expected` seconds."""
        measured, now = self._of(tier, by_layers), self._clock()
        if now - measured.tried > RETRY_SECONDS:
            measured.share = None
        measured.tried = now
        self._running[request] = measured, now, expected

    def end(self, request: Hashable) -> None:
        """Its first step has a result. No effect for requests that did not begin."""
        measured, begun, expected = self._running.pop(request, (None, 0.0, 0.0))
        if measured is not None:
            share = (self._clock() - begun) / expected
            old = share if measured.share is None else measured.share
            measured.share = (1 - NEW_SHARE) * old + NEW_SHARE * share

    def forget(self, request: Hashable) -> None:
        """It ended otherwise, or went another way in between."""
        self._running.pop(request, None)

    def _of(self, tier: str, by_layers: bool) -> _Measured:
        return self._measured.setdefault((tier, by_layers), _Measured())

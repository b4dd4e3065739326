"""A circuit breaker: a worker that fails again and again is left alone for a while."""

from collections.abc import Callable

_LONGEST_COOLDOWN = 16


class Breaker:
    """Closed until `failures` in a row; then open for `cooldown_s`, after which one trial request decides."""

    def __init__(self, failures: int, cooldown_s: float, clock: Callable[[], float]):
        self._limit, self._cooldown_s, self._clock = failures, cooldown_s, clock
        self._failed = 0
        self._open_until: float | None = None
        self._factor = 1
        self._trial = False

    @property
    def state(self) -> str:
        """`closed`, `open`, or `half_open`: cooled down and waiting for the trial to start or to end."""
        if self._open_until is None:
            return "closed"
        return "open" if self._clock() < self._open_until else "half_open"

    def allows(self) -> bool:
        """Whether a request may start now."""
        return self.state == "closed" or (self.state == "half_open" and not self._trial)

    def start(self) -> None:
        """A request starts; in half_open it is the trial."""
        self._trial = self._trial or self.state == "half_open"

    def succeed(self) -> None:
        """A worker answered: the circuit closes."""
        self._failed, self._open_until, self._factor, self._trial = 0, None, 1, False

    def fail(self) -> None:
        """A worker failed; the last of a row, or a failed trial, opens the circuit."""
        self._failed += 1
        if self.state == "half_open":
            self._factor = min(self._factor * 2, _LONGEST_COOLDOWN)
            self._open(self._factor)
        elif self.state == "closed" and self._failed >= self._limit:
            self._open(1)

    def abandon(self) -> None:
        """A request ended without a verdict, such as a client that went away; another may be the trial."""
        self._trial = False

    def _open(self, factor: int) -> None:
        self._open_until = self._clock() + self._cooldown_s * factor
        self._trial = False

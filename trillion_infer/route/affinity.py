"""Homes of sessions: rendezvous order with bounded load (Mirrokni, Thorup, Zadimoghaddam 2018, on session counts)."""

import hashlib
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

_SMALLEST_CAP = 2


def preference(session: str, workers: Sequence[str]) -> list[str]:
    """Workers in the order in which `session` prefers them; the same for every process and every order of `workers`.

    Taking a worker away leaves the order of the others, so only its own sessions move.
    """

    def weight(worker: str) -> bytes:
        return hashlib.blake2b(f"{worker}\n{session}".encode("utf-8", "surrogatepass"), digest_size=16).digest()

    return sorted(workers, key=weight, reverse=True)


def session_cap(sessions: int, workers: int, balance: float) -> int:
    """Sessions a worker may hold: `balance` times the even share, rounded down, but always enough to hold all."""
    return max(_SMALLEST_CAP, math.ceil(sessions / workers), math.floor(balance * sessions / workers))


class SessionHomes:
    """The home of each session that is alive here. A home stays while its worker is up."""

    def __init__(self, balance: float, capacity: int, ttl_s: float, clock: Callable[[], float]):
        self._balance, self._capacity, self._ttl_s, self._clock = balance, capacity, ttl_s, clock
        self._homes: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._counts: Counter[str] = Counter()

    def home(self, session: str, up: Sequence[str]) -> str:
        """Home of `session` among the workers that are `up` (at least one); settles it if it has none."""
        now = self._clock()
        self._expire(now)
        home = self._forget(session)
        if home is None or home not in up:
            alive = sum(self._counts[worker] for worker in up)
            cap = session_cap(alive + 1, len(up), self._balance)
            home = next(worker for worker in preference(session, up) if self._counts[worker] < cap)
        self._homes[session] = (home, now)
        self._counts[home] += 1
        return home

    def counts(self) -> dict[str, int]:
        """Sessions at home on each worker."""
        return dict(self._counts)

    def check_integrity(self) -> None:
        """Raises AssertionError if the counts are not those of the homes."""
        held = Counter(home for home, _ in self._homes.values())
        assert held == +self._counts, f"{held} != {self._counts}"

    def _expire(self, now: float) -> None:
        while self._homes:
            session, (_, seen) = next(iter(self._homes.items()))
            if len(self._homes) <= self._capacity and now - seen <= self._ttl_s:
                return
            self._forget(session)

    def _forget(self, session: str) -> str | None:
        home, _ = self._homes.pop(session, (None, 0.0))
        if home is not None:
            self._counts[home] -= 1
        return home

"""Requests in the order in which they are served."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import count

from trillion_infer.core.request import Request


class Ranks:
    """Rank of each live request: by `Request.priority` (the smaller first, as in vLLM), then by arrival."""

    def __init__(self) -> None:
        self._arrivals = count()
        self._ranks: dict[Request, tuple[int, int]] = {}

    def add(self, request: Request) -> None:
        self._ranks[request] = (request.priority, next(self._arrivals))

    def remove(self, request: Request) -> None:
        del self._ranks[request]

    def __getitem__(self, request: Request) -> tuple[int, int]:
        return self._ranks[request]


class RankedList:
    """A list of requests kept in rank order."""

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self._items: list[Request] = []

    def add(self, request: Request) -> None:
        insort(self._items, request, key=self._ranks.__getitem__)

    def remove(self, request: Request) -> None:
        place = bisect_left(self._items, self._ranks[request], key=self._ranks.__getitem__)
        assert self._items[place] is request, f"request {request.request_id} is not in the list"
        del self._items[place]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._items)

    def __reversed__(self) -> Iterator[Request]:
        return reversed(self._items)

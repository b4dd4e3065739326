"""Between workers of one process, for tests: a fetch hands over the array itself."""

from collections.abc import Callable, Sequence

import jax

from trillion_infer.transfer.transports.base import TransferError


class MemoryTransport:
    """`space`: what all workers share. `fault`: called before each fetch; may raise TransferError."""

    name = "memory"

    def __init__(self, space: dict[tuple[str, int], list[jax.Array]], address: str):
        self.address, self._space = address, space
        self.fault: Callable[[], None] = lambda: None

    def expose(self, ticket: int, arrays: Sequence[jax.Array]) -> None:
        self._space[self.address, ticket] = list(arrays)

    def withdraw(self, ticket: int) -> None:
        self._space.pop((self.address, ticket), None)

    def fetch(
        self, address: str, ticket: int, specs: Sequence[jax.ShapeDtypeStruct], timeout_s: float
    ) -> "_Handed | _Broken":
        try:
            self.fault()
        except TransferError as error:
            return _Broken(error)
        found = self._space.get((address, ticket))
        if found is None:
            return _Broken(TransferError(f"{address} has nothing under ticket {ticket}: the lease has ended."))
        return _Handed([jax.device_put(a, spec.sharding) for a, spec in zip(found, specs, strict=True)])

    def close(self) -> None:
        for place in [place for place in self._space if place[0] == self.address]:
            del self._space[place]


class _Handed:
    def __init__(self, arrays: list[jax.Array]):
        self._arrays = arrays

    def poll(self) -> list[jax.Array] | None:
        return self._arrays


class _Broken:
    def __init__(self, error: TransferError):
        self._error = error

    def poll(self) -> list[jax.Array] | None:
        raise self._error

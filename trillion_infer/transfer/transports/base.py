"""The interface: arrays are exposed under tickets on one side and fetched by ticket from the other."""

from collections.abc import Sequence
from typing import Protocol

import jax

from trillion_infer.core.errors import TrillionInferError


class TransferError(TrillionInferError, RuntimeError):
    """Pages could not be fetched."""


class Fetch(Protocol):
    """Arrays on their way."""

    def poll(self) -> list[jax.Array] | None:
        """The arrays, None while they are on their way. Raises TransferError, once they will not come."""
        ...


class Transport(Protocol):
    """Moves arrays that lie on one device each; `specs` say where those that are fetched shall lie.

    A ticket is a number that its side never uses again. What is fetched is what the arrays hold: they are not changed
    while they are exposed.
    """

    name: str
    address: str

    def expose(self, ticket: int, arrays: Sequence[jax.Array]) -> None: ...

    def withdraw(self, ticket: int) -> None:
        """Fetches that begin later fail at once. Unknown tickets change nothing."""
        ...

    def fetch(self, address: str, ticket: int, specs: Sequence[jax.ShapeDtypeStruct], timeout_s: float) -> Fetch: ...

    def close(self) -> None: ...

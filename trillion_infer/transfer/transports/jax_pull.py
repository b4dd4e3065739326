"""Device to device by jax.experimental.transfer: the destination pulls what the source has armed for it.

The library knows no way to take an armed array back, and a pull of one that is not armed waits for ever. So arrays are
armed only when a peer asks for their ticket, and polled here until a deadline.
"""

import itertools
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax

from trillion_infer.core.errors import ConfigError
from trillion_infer.transfer.handoff.wire import Channel, pack
from trillion_infer.transfer.transports.base import TransferError
from trillion_infer.transfer.transports.tickets import ThreadFetch, TicketServer

POLL_S = 0.001


class JaxPullTransport:
    """Raises ConfigError where this jax or its backend has no transfer server."""

    name = "jax"

    def __init__(self, key: bytes, host: str):
        try:
            from jax.experimental import transfer

            client = jax.devices()[0].client
            self._pulls = transfer.start_transfer_server(client, f"{host}:0", [f"{host}:0"])
        except Exception as error:
            raise ConfigError(
                f"jax.experimental.transfer does not run on this backend ({error}); use --handoff_transport=socket."
            ) from error
        self._numbers = itertools.count(secrets.randbits(62))
        self._connections: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._server = TicketServer(key, host, self._arm)
        self.address = self._server.address
        self.expose, self.withdraw, self.close = self._server.expose, self._server.withdraw, self._server.close

    def _arm(self, channel: Channel, arrays: list[jax.Array], question: dict) -> None:
        number = next(self._numbers)
        self._pulls.await_pull(number, arrays)
        channel.send(pack({"number": number, "address": self._pulls.address()}))

    def fetch(self, address: str, ticket: int, specs: Sequence[jax.ShapeDtypeStruct], timeout_s: float) -> ThreadFetch:
        deadline = time.monotonic() + timeout_s

        def pull(_: Channel, answer: dict) -> list[jax.Array]:
            try:
                arrays = self._connection(answer["address"]).pull(answer["number"], list(specs))
                while not all(array.is_ready() for array in arrays):
                    if time.monotonic() > deadline:
                        raise TransferError(f"{address} did not send ticket {ticket} within {timeout_s:g} s.")
                    time.sleep(POLL_S)
                return jax.block_until_ready(arrays)
            except jax.errors.JaxRuntimeError as error:
                self._connections.pop(answer["address"], None)
                raise TransferError(f"fetching from {address} failed: {error}") from error

        return ThreadFetch(self._server.fetchers.submit(lambda: self._server.ask(address, ticket, timeout_s, pull)))

    def _connection(self, address: str) -> Any:
        with self._lock:
            if address not in self._connections:
                self._connections[address] = self._pulls.connect(address)
            return self._connections[address]

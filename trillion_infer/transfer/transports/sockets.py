"""Pages over plain TCP, through host memory: for backends on which jax.experimental.transfer does not run."""

from collections.abc import Sequence

import jax
import numpy as np

from trillion_infer.transfer.handoff.wire import Channel, pack
from trillion_infer.transfer.transports.base import TransferError
from trillion_infer.transfer.transports.tickets import ThreadFetch, TicketServer

PART_BYTES = 16 * 2**20


class SocketTransport:
    """Sends every array as signed frames of at most 16 MiB."""

    name = "socket"

    def __init__(self, key: bytes, host: str):
        self._server = TicketServer(key, host, _send)
        self.address = self._server.address
        self.expose, self.withdraw, self.close = self._server.expose, self._server.withdraw, self._server.close

    def fetch(self, address: str, ticket: int, specs: Sequence[jax.ShapeDtypeStruct], timeout_s: float) -> ThreadFetch:
        def work() -> list[jax.Array]:
            return self._server.ask(
                address, ticket, timeout_s, lambda channel, answer: _receive(channel, answer, specs)
            )

        return ThreadFetch(self._server.fetchers.submit(work))


def _send(channel: Channel, arrays: list[jax.Array], question: dict) -> None:
    hosts = [np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8) for array in arrays]
    channel.send(pack({"sizes": [host.nbytes for host in hosts]}))
    for host in hosts:
        for start in range(0, host.nbytes, PART_BYTES):
            channel.send(host[start : start + PART_BYTES].data)


def _receive(channel: Channel, answer: dict, specs: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    wanted = [int(np.prod(spec.shape)) * spec.dtype.itemsize for spec in specs]
    if answer["sizes"] != wanted:
        raise TransferError(f"arrays of {answer['sizes']} bytes were offered and {wanted} are expected.")
    arrays = []
    for spec, size in zip(specs, wanted, strict=True):
        data = b"".join(channel.receive() for _ in range(0, size, PART_BYTES))
        arrays.append(jax.device_put(np.frombuffer(data, spec.dtype).reshape(spec.shape), spec.sharding))
    return arrays

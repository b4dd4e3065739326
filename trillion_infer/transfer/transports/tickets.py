"""What networked transports share: a server that answers for tickets, and fetches on threads of their own."""

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import msgpack

from trillion_infer.transfer.handoff.wire import Channel, WireError, address_of, dial, listen, pack, stop_listening
from trillion_infer.transfer.transports.base import TransferError

FETCHERS = 4
"""Fetches of one worker at a time; more wait."""


class TicketServer:
    """Exposed arrays by ticket, and a port at which peers with the key ask for them.

    answer(channel, arrays, question): sends what a peer needs to have the arrays. A ticket that is not there any more
    is answered at once, so that nobody waits for pages whose lease has ended.
    """

    def __init__(self, key: bytes, host: str, answer: Callable[[Channel, list[jax.Array], dict], None]):
        self._key, self._answer = key, answer
        self._exposed: dict[int, list[jax.Array]] = {}
        self._listener = listen(host, 0)
        self.address = address_of(self._listener)
        self._channels: dict[str, list[Channel]] = {}
        self._open: set[Channel] = set()
        self._lock = threading.Lock()
        self.fetchers = ThreadPoolExecutor(FETCHERS, thread_name_prefix="fetch")
        threading.Thread(target=self._accept, name="tickets", daemon=True).start()

    def expose(self, ticket: int, arrays: Sequence[jax.Array]) -> None:
        self._exposed[ticket] = list(arrays)

    def withdraw(self, ticket: int) -> None:
        self._exposed.pop(ticket, None)

    def close(self) -> None:
        stop_listening(self._listener)
        self.fetchers.shutdown(wait=False, cancel_futures=True)
        for channel in [*self._open, *(c for kept in self._channels.values() for c in kept)]:
            channel.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock,), name="tickets", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.closing(sock), contextlib.suppress(WireError, OSError):
            channel = Channel(sock, self._key, is_server=True)
            channel.exchange(b"")
            self._open.add(channel)
            try:
                while True:
                    question = msgpack.unpackb(channel.receive())
                    arrays = self._exposed.get(question["ticket"])
                    if arrays is None:
                        channel.send(pack({"error": "the lease has ended"}))
                    else:
                        self._answer(channel, arrays, question)
            finally:
                self._open.discard(channel)

    def ask(
        self, address: str, ticket: int, timeout_s: float, read: Callable[[Channel, dict], list[jax.Array]]
    ) -> list[jax.Array]:
        """Asks for a ticket over a kept connection; `read` turns the answer into arrays. Raises TransferError."""
        channel = None
        try:
            channel = self._take(address)
            channel.set_patience(timeout_s)
            channel.send(pack({"ticket": ticket}))
            answer = msgpack.unpackb(channel.receive())
            arrays = None if "error" in answer else read(channel, answer)
        except (WireError, OSError, TransferError) as error:
            if channel is not None:
                channel.close()
            raise TransferError(f"fetching from {address} failed: {error}") from error
        with self._lock:
            self._channels.setdefault(address, []).append(channel)
        if arrays is None:
            raise TransferError(f"{address} has nothing under ticket {ticket}: {answer['error']}.")
        return arrays

    def _take(self, address: str) -> Channel:
        with self._lock:
            kept = self._channels.get(address)
            if kept:
                return kept.pop()
        channel = dial(address, self._key)
        channel.exchange(b"")
        return channel


class ThreadFetch:
    """A fetch that a thread works on."""

    def __init__(self, future: "Future[list[jax.Array]]"):
        self._future = future

    def poll(self) -> list[jax.Array] | None:
        if not self._future.done():
            return None
        error = self._future.exception()
        if error is not None:
            raise error if isinstance(error, TransferError) else TransferError(f"fetching failed: {error!r}")
        return self._future.result()

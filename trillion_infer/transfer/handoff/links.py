"""Connections to other workers: dialled to those that prefill for this one, accepted from those it prefills for."""

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trillion_infer.core.errors import ConfigError
from trillion_infer.transfer.handoff.identity import Identity
from trillion_infer.transfer.handoff.messages import Message, MessageCodec, ProtocolError
from trillion_infer.transfer.handoff.wire import Channel, WireError, address_of, dial, listen, stop_listening

RETRY_S = (0.1, 3.0)
"""Seconds between two tries to reach a peer, at first and at most."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LinkEvent:
    """What happened on a link. asks: this worker dialled it, to ask. message: None for a link that opened or broke."""

    peer: str
    asks: bool
    is_open: bool
    identity: Identity
    message: Message | None = None


class Links:
    """All links of a worker. Events wait in `inbox`; `wake` is called after each.

    A dialled peer is known by its address, an accepted one by its name and epoch. Peers that refuse the handshake are
    logged, counted and tried again: they may be restarted with the right options.
    """

    def __init__(self, identity: Identity, key: bytes, host: str, port: int):
        self.identity, self._key = identity, key
        self.inbox: queue.SimpleQueue[LinkEvent] = queue.SimpleQueue()
        self.wake: Callable[[], None] = lambda: None
        self.refusals: dict[str, str] = {}
        self._codec = MessageCodec()
        self._channels: dict[tuple[str, bool], Channel] = {}
        self._dialled: set[str] = set()
        self._closed = False
        self._listener = listen(host, port)
        self.address = address_of(self._listener)
        self._start(self._accept)

    def dial(self, addresses: Sequence[str]) -> None:
        """Keeps links to these prefill workers from now on; those it knows change nothing."""
        for address in addresses:
            if address not in self._dialled:
                self._dialled.add(address)
                self._start(self._keep, address)

    def send(self, peer: str, asks: bool, message: Message) -> None:
        """Sends if the link is up; what cannot be sent is lost, as the protocol allows."""
        channel = self._channels.get((peer, asks))
        if channel is not None:
            with contextlib.suppress(WireError):
                channel.send(self._codec.pack(message))

    def close(self) -> None:
        self._closed = True
        stop_listening(self._listener)
        for channel in list(self._channels.values()):
            channel.close()

    def _start(self, function: Callable[..., None], *args: object) -> None:
        threading.Thread(target=function, args=args, name="handoff-link", daemon=True).start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._start(self._welcome, sock)

    def _welcome(self, sock: socket.socket) -> None:
        with contextlib.closing(sock):
            try:
                channel = Channel(sock, self._key, is_server=True)
                theirs = self._met("an asker", channel)
            except (WireError, OSError) as error:
                self._refused("an asker", str(error))
                return
            if theirs is not None:
                self._serve(f"{theirs.name}/{theirs.epoch}", False, channel, theirs)

    def _keep(self, address: str) -> None:
        """Dials again and again; each link lasts until it breaks."""
        wait = RETRY_S[0]
        while not self._closed:
            try:
                channel = dial(address, self._key)
                theirs = self._met(address, channel)
            except (WireError, OSError) as error:
                self._refused(address, str(error))
                theirs = None
            else:
                if theirs is not None:
                    wait = RETRY_S[0]
                    self.refusals.pop(address, None)
                    self._serve(address, True, channel, theirs)
            time.sleep(wait)
            wait = min(2 * wait, RETRY_S[1])

    def _met(self, peer: str, channel: Channel) -> Identity | None:
        theirs = Identity.unpack(channel.exchange(self.identity.pack()))
        try:
            self.identity.check(theirs)
        except ConfigError as error:
            self._refused(peer, str(error))
            channel.close()
            return None
        return theirs

    def _refused(self, peer: str, reason: str) -> None:
        if self.refusals.get(peer) != reason:
            self.refusals[peer] = reason
            log.warning("no hand-off with %s: %s", peer, reason)

    def _serve(self, peer: str, asks: bool, channel: Channel, theirs: Identity) -> None:
        self._channels[peer, asks] = channel
        if self._closed:
            channel.close()
        self._tell(LinkEvent(peer, asks, True, theirs))
        try:
            while True:
                message = self._codec.unpack(channel.receive())
                self._tell(LinkEvent(peer, asks, True, theirs, message))
        except (WireError, ProtocolError) as error:
            if not self._closed:
                log.info("link to %s ended: %s", peer, error)
        finally:
            channel.close()
            if self._channels.get((peer, asks)) is channel:
                del self._channels[peer, asks]
                self._tell(LinkEvent(peer, asks, False, theirs))

    def _tell(self, event: LinkEvent) -> None:
        self.inbox.put(event)
        self.wake()

"""Authenticated frames over a socket: both ends prove that they know the key, and every frame carries an HMAC.

Opening, in clear: 4 bytes of magic, 1 of version, 16 of nonce, from each end. Then frames: length (4 bytes, little
endian), body, HMAC-SHA256 over direction, frame number and body under a key made of the shared one and both nonces.
Nothing can be forged, replayed, reordered or reflected without the key; nothing is kept secret.
"""

import contextlib
import hashlib
import hmac
import secrets
import socket
import struct
import threading
from typing import Any

import msgpack

from trillion_infer.core.errors import TrillionInferError

MAGIC, VERSION = b"TIho", 2
MAX_FRAME = 64 * 2**20
OPENING_S = 10.0
SEND_S = 10
_OPENING = struct.Struct("<4sB16s")
_LENGTH = struct.Struct("<I")
_MAC = 32


class WireError(TrillionInferError, RuntimeError):
    """The connection cannot be trusted or is broken."""


class Channel:
    """One connection. `send` may be called by many threads, `receive` by one."""

    def __init__(self, sock: socket.socket, key: bytes, is_server: bool):
        sock.settimeout(OPENING_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._sending = sock, threading.Lock()
        self._out, self._in = (b"s", b"c") if is_server else (b"c", b"s")
        self._sent = self._received = 0
        ours = secrets.token_bytes(16)
        sock.sendall(_OPENING.pack(MAGIC, VERSION, ours))
        magic, version, theirs = _OPENING.unpack(self._read(_OPENING.size))
        if magic != MAGIC:
            raise WireError(f"the peer opened with {magic!r}; it does not speak the hand-off protocol.")
        if version != VERSION:
            raise WireError(f"the peer speaks version {version} of the hand-off protocol, this worker {VERSION}.")
        nonces = ours + theirs if is_server else theirs + ours
        self._key = hmac.digest(key, b"trillion_infer/handoff/1" + nonces, hashlib.sha256)

    def exchange(self, hello: bytes) -> bytes:
        """Sends the first frame and returns the peer's. Raises WireError when the keys differ."""
        self.send(hello)
        found = self.receive()
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_S, 0))
        return found

    def send(self, *parts: bytes | memoryview) -> None:
        """Sends one frame made of these parts. Raises WireError if it cannot be sent in time."""
        size = sum(len(part) for part in parts)
        if size > MAX_FRAME:
            raise WireError(f"a frame of {size} bytes is above {MAX_FRAME}; send it in parts.")
        with self._sending:
            mac = self._mac(self._out, self._sent, parts)
            self._sent += 1
            try:
                for part in (_LENGTH.pack(size), *parts, mac):
                    self._socket.sendall(part)
            except OSError as error:
                self.close()
                raise WireError(f"the connection broke while sending ({error}).") from error

    def receive(self) -> bytes:
        """The next frame. Raises WireError at the end of the connection, and for a frame that is not the peer's."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > MAX_FRAME:
            raise WireError(f"the peer announces a frame of {length} bytes; at most {MAX_FRAME} are taken.")
        body, mac = self._read(length), self._read(_MAC)
        if not hmac.compare_digest(mac, self._mac(self._in, self._received, (body,))):
            raise WireError("a frame is not signed with this worker's key: give both sides the same --handoff_key.")
        self._received += 1
        return body

    def set_patience(self, seconds: float) -> None:
        """`receive` raises when nothing comes for so long."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _mac(self, direction: bytes, number: int, parts: tuple[bytes | memoryview, ...]) -> bytes:
        mac = hmac.new(self._key, direction + struct.pack("<Q", number), hashlib.sha256)
        for part in parts:
            mac.update(part)
        return mac.digest()

    def _read(self, count: int) -> bytes:
        data, at = bytearray(count), 0
        view = memoryview(data)
        while at < count:
            try:
                got = self._socket.recv_into(view[at:])
            except OSError as error:
                raise WireError(f"the connection broke ({error}).") from error
            if got == 0:
                raise WireError("the peer closed the connection.")
            at += got
        return bytes(data)


def pack(value: Any) -> bytes:
    """Plain data as msgpack."""
    return msgpack.packb(value, use_bin_type=True)  # pyright: ignore[reportReturnType]


def dial(address: str, key: bytes) -> Channel:
    """A channel to HOST:PORT. Raises WireError."""
    host, _, port = address.rpartition(":")
    try:
        return Channel(socket.create_connection((host.strip("[]"), int(port)), OPENING_S), key, is_server=False)
    except (OSError, ValueError) as error:
        raise WireError(f"{address} cannot be reached ({error}).") from error


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError if the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=64)


def stop_listening(sock: socket.socket) -> None:
    """Closes a listening socket, also for a thread that waits in `accept`."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def address_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

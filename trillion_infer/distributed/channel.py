"""A connection between two processes that share a key: every frame carries a keyed digest of its place and content."""

import contextlib
import hashlib
import hmac
import secrets
import socket
import struct
import threading

NONCE, DIGEST = 32, 32
MOST_BYTES = 1 << 30
"""Largest frame that is taken."""

_HEADER = struct.Struct("!I")
_COUNT = struct.Struct("!Q")


class ChannelError(Exception):
    """The other side is gone, or is not who it must be."""


class Channel:
    """Frames in both directions, in order, each with HMAC-SHA256 over direction, number and content.

    `send` may be called from several threads, `receive` from one. The sides prove that they hold `key` before a frame
    is read (see `accept`, `connect`); content is authenticated, not hidden.
    """

    def __init__(self, connection: socket.socket, key: bytes, is_server: bool):
        self._socket, self._key = connection, key
        self._out, self._in = (b"s", b"c") if is_server else (b"c", b"s")
        self._sent = self._received = 0
        self._lock = threading.Lock()

    def send(self, content: bytes) -> None:
        """Raises ChannelError where the other side is gone."""
        with self._lock:
            frame = _HEADER.pack(len(content)) + self._digest(self._out, self._sent, content) + content
            self._sent += 1
            try:
                self._socket.sendall(frame)
            except OSError as error:
                raise ChannelError(f"the connection broke: {error.strerror or error}") from error

    def receive(self) -> bytes:
        """The next frame. Raises ChannelError at the end of the connection and for a frame that was tampered with."""
        (size,) = _HEADER.unpack(_read(self._socket, _HEADER.size))
        if size > MOST_BYTES:
            raise ChannelError(f"a frame of {size} bytes was announced; at most {MOST_BYTES} are taken")
        digest, content = _read(self._socket, DIGEST), _read(self._socket, size)
        if not hmac.compare_digest(digest, self._digest(self._in, self._received, content)):
            raise ChannelError("a frame's digest is wrong")
        self._received += 1
        return content

    def close(self) -> None:
        """Ends both directions; a thread that waits in `receive` gets ChannelError."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _digest(self, direction: bytes, number: int, content: bytes) -> bytes:
        return _mac(self._key, direction, _COUNT.pack(number), content)


def accept(connection: socket.socket, key: bytes) -> Channel:
    """The server's side of a new connection. Raises ChannelError where the client has another key."""
    _keep_alive(connection)
    ours = secrets.token_bytes(NONCE)
    _write(connection, ours)
    theirs, proof = _read(connection, NONCE), _read(connection, DIGEST)
    if not hmac.compare_digest(proof, _mac(key, b"client", ours, theirs)):
        raise ChannelError("it has another key")
    _write(connection, _mac(key, b"server", ours, theirs))
    return Channel(connection, _mac(key, b"session", ours, theirs), is_server=True)


def connect(connection: socket.socket, key: bytes) -> Channel:
    """The client's side. Raises ChannelError where the server has another key."""
    _keep_alive(connection)
    theirs, ours = _read(connection, NONCE), secrets.token_bytes(NONCE)
    _write(connection, ours + _mac(key, b"client", theirs, ours))
    try:
        proof = _read(connection, DIGEST)
    except ChannelError as error:
        raise ChannelError("it refused the key") from error
    if not hmac.compare_digest(proof, _mac(key, b"server", theirs, ours)):
        raise ChannelError("it has another key")
    return Channel(connection, _mac(key, b"session", theirs, ours), is_server=False)


def _mac(key: bytes, *parts: bytes) -> bytes:
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        mac.update(_COUNT.pack(len(part)))
        mac.update(part)
    return mac.digest()


def _write(connection: socket.socket, data: bytes) -> None:
    try:
        connection.sendall(data)
    except OSError as error:
        raise ChannelError(f"the connection broke: {error.strerror or error}") from error


def _read(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        try:
            count = connection.recv_into(view[at:])
        except OSError as error:
            raise ChannelError(f"the connection broke: {error.strerror or error}") from error
        if not count:
            raise ChannelError("the connection was closed")
        at += count
    return bytes(data)


def _keep_alive(connection: socket.socket) -> None:
    """Small frames leave at once, and a host that vanished without a word is noticed within half a minute."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

"""How the processes of a mesh find each other.

The leader listens where jax.distributed's coordinator does; its address, and a key unless one is given, travel by a
collective over the devices, which only processes of the program take part in.
"""

import secrets
import socket
import time
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from trillion_infer.core.errors import ConfigError, GroupError
from trillion_infer.distributed.channel import Channel, ChannelError, accept, connect
from trillion_infer.distributed.group import Follower, Group, Leader
from trillion_infer.distributed.wire import pack, unpack

KEY_BYTES = 32
JOIN_S, REFUSED_S, HANDSHAKE_S = 120.0, 10.0, 20.0
"""Seconds that processes have to join; that the right ones still have after a wrong one came; and for its greeting."""


def processes_of(mesh: Mesh) -> list[int]:
    """The processes whose devices a mesh has."""
    return sorted({device.process_index for device in mesh.devices.flat})


def form_group(mesh: Mesh, key_file: str | None) -> Group:
    """Connects the processes of a mesh over all processes. Every process must call it.

    Raises ConfigError for a mesh that leaves a process out, GroupError where one does not join or has another key.
    """
    members = processes_of(mesh)
    if len(members) != jax.process_count():
        raise ConfigError(
            f"the mesh has devices of processes {members} and there are {jax.process_count()}; use devices of every "
            f"process ({jax.device_count()} in all), or start fewer processes."
        )
    own_key = _read_key(key_file)
    if jax.process_index() == 0:
        return _lead(own_key)
    return _join(own_key)


def _read_key(key_file: str | None) -> bytes | None:
    if key_file is None:
        return None
    try:
        key = Path(key_file).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"group_key_file {key_file} cannot be read: {error.strerror or error}.") from error
    if len(key) < 16:
        raise ConfigError(f"group_key_file {key_file} holds {len(key)} bytes; a key has 16 or more.")
    return key


def _lead(own_key: bytes | None) -> Leader:
    key = own_key or secrets.token_bytes(KEY_BYTES)
    family, address = _own_address()
    with socket.create_server((address, 0), family=family) as server:
        host, port = server.getsockname()[:2]
        _share(_Invitation(host, port, b"" if own_key else key))
        channels: dict[str, Channel] = {}
        refused: list[str] = []
        deadline = time.monotonic() + JOIN_S
        while len(channels) < jax.process_count() - 1:
            server.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                connection, peer = server.accept()
            except TimeoutError:
                raise GroupError(_missing(list(channels), refused)) from None
            try:
                name, channel = _admit(connection, key)
                channels[name] = channel
            except (ChannelError, ValueError) as error:
                connection.close()
                refused.append(f"{peer[0]}:{peer[1]} ({error})")
                deadline = min(deadline, time.monotonic() + REFUSED_S)
        return Leader(dict(sorted(channels.items())))


def _admit(connection: socket.socket, key: bytes) -> tuple[str, Channel]:
    connection.settimeout(HANDSHAKE_S)
    channel = accept(connection, key)
    name = str(unpack(channel.receive())[1])
    connection.settimeout(None)
    return name, channel


def _missing(joined: list[str], refused: list[str]) -> str:
    wanted = jax.process_count() - 1
    why = f"refused: {', '.join(refused)}; give every process the same group_key_file" if refused else "look at them"
    return f"{wanted - len(joined)} of {wanted} followers did not join (joined: {', '.join(joined) or 'none'}; {why})."


def _join(own_key: bytes | None) -> Follower:
    invitation = _share(None)
    if bool(invitation.key) == bool(own_key):
        raise GroupError("some processes have a group_key_file and others do not; give it to all of them or to none.")
    name = f"process {jax.process_index()} ({socket.gethostname()})"
    try:
        connection = socket.create_connection((invitation.host, invitation.port), timeout=HANDSHAKE_S)
        channel = connect(connection, own_key or invitation.key)
        channel.send(pack(["hello", name]))
        connection.settimeout(None)
    except (OSError, ChannelError) as error:
        raise GroupError(
            f"{name} cannot join the leader at {invitation.host}:{invitation.port}: {error}. Give every process the "
            "same group_key_file, and let them reach that address."
        ) from error
    return Follower(name, channel)


class _Invitation:
    """Where the leader listens, and the key where none was given, in a fixed number of bytes."""

    SIZE = 320

    def __init__(self, host: str, port: int, key: bytes):
        self.host, self.port, self.key = host, port, key

    def pack(self) -> np.ndarray:
        data = pack(["join", self.host, self.port, self.key])
        return np.frombuffer(len(data).to_bytes(4, "little") + data.ljust(self.SIZE, b"\0"), np.uint8)

    @classmethod
    def unpack(cls, data: np.ndarray) -> "_Invitation":
        raw = data.astype(np.uint8).tobytes()
        return cls(*unpack(raw[4 : 4 + int.from_bytes(raw[:4], "little")])[1:])


def _share(invitation: _Invitation | None) -> _Invitation:
    """Process 0's invitation, in every process."""
    blank = np.zeros(_Invitation.SIZE + 4, np.uint8)
    mine = blank if invitation is None else invitation.pack()
    return _Invitation.unpack(np.asarray(multihost_utils.broadcast_one_to_all(mine)))


def _own_address() -> tuple[socket.AddressFamily, str]:
    """The address that jax.distributed's coordinator has, which runs in process 0."""
    from jax._src import distributed

    coordinator = distributed.global_state.coordinator_address or "127.0.0.1:0"
    host = coordinator.rpartition(":")[0].strip("[]")
    try:
        family, *_, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise GroupError(f"the coordinator's address {host} cannot be found ({error}); give another.") from error
    return family, str(address[0])

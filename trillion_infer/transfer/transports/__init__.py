"""How the bytes of KV pages travel between processes: one interface, and what implements it."""

from typing import TYPE_CHECKING

from trillion_infer.core.errors import ConfigError

if TYPE_CHECKING:
    from trillion_infer.transfer.transports.base import Transport

TRANSPORTS = ("auto", "jax", "socket")


def make_transport(name: str, key: bytes, host: str) -> "Transport":
    """`jax`: device to device by jax.experimental.transfer. `socket`: through host memory over TCP, signed.

    `auto` is `jax`, and `socket` where this jax or its backend lacks the former. Raises ConfigError.
    """
    from trillion_infer.transfer.transports.jax_pull import JaxPullTransport
    from trillion_infer.transfer.transports.sockets import SocketTransport

    if name not in TRANSPORTS:
        raise ConfigError(f"handoff_transport is {name!r}; it must be one of {', '.join(TRANSPORTS)}.")
    if name == "socket":
        return SocketTransport(key, host)
    try:
        return JaxPullTransport(key, host)
    except ConfigError:
        if name == "jax":
            raise
        return SocketTransport(key, host)

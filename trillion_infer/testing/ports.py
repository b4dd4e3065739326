"""Ports for processes that bind them later."""

import contextlib
import random
import socket

_BELOW_EPHEMERAL = range(10_000, 32_000)
"""Systems give outgoing connections ports above these, so none takes one between its choice and its use."""


def free_ports(count: int) -> list[int]:
    """Distinct ports of the loopback that nobody listens on."""
    found: set[int] = set()
    while len(found) < count:
        port = random.SystemRandom().choice(_BELOW_EPHEMERAL)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.add(port)
    return list(found)


def free_port() -> int:
    """One of them."""
    return free_ports(1)[0]

"""Ports for processes that bind them later."""

import random
import socket

_BELOW_EPHEMERAL = range(10_000, 32_000)
"""Systems give outgoing connections ports above these, so none takes one between its choice and its use."""


def free_ports(count: int) -> list[int]:
    """Distinct ports of the loopback that nobody listens on."""
    found: list[int] = []
    for port in random.SystemRandom().sample(_BELOW_EPHEMERAL, len(_BELOW_EPHEMERAL)):
        if len(found) == count:
            break
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(port)
    return found


def free_port() -> int:
    """One of them."""
    return free_ports(1)[0]

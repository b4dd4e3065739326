"""Budgets and places of the KV tiers beyond device memory, as users write them."""

import math
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from trillion_infer.core.errors import ConfigError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
SEGMENT_BYTES = 1 << 30
"""Memory that a process lends a Mooncake store unless it says otherwise."""


@dataclass(frozen=True)
class DiskBudget:
    """A folder and the bytes it may take."""

    folder: Path
    num_bytes: int


@dataclass(frozen=True)
class MooncakeStore:
    """A Mooncake master, and what this process brings.

    segment: bytes of this process's memory lent to the store, 0 for none. host: the address under which other
    processes reach it. protocol: tcp or rdma.
    """

    master: str
    port: int
    segment: int
    host: str
    protocol: str


@dataclass(frozen=True)
class ObjectStore:
    """A folder of any file system that fsspec knows. num_bytes: the oldest blocks beyond are removed; 0: no limit."""

    url: str
    num_bytes: int


def parse_disk(text: str) -> DiskBudget:
    """`FOLDER:BYTES`, such as /nvme/kv:100e9. Raises ConfigError."""
    folder, colon, size = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    number = _number(size)
    if not colon or not folder or not math.isfinite(number) or number < 1:
        raise ConfigError(f"disk_kv is {text!r}; it must be FOLDER:BYTES, such as /nvme/kv:100e9.")
    return DiskBudget(Path(folder).expanduser(), int(number))


def parse_store(text: str) -> MooncakeStore | ObjectStore:
    """`mooncake://HOST:PORT[?segment=BYTES&host=ADDRESS&protocol=tcp|rdma]` or `SCHEME://PATH[?bytes=BYTES]`.

    Raises ConfigError.
    """
    forms = "it must be mooncake://HOST:PORT or a folder as fsspec names it, such as file:///mnt/kv"
    parts = urlsplit(text) if isinstance(text, str) else None
    if parts is None or not parts.scheme or not (parts.netloc or parts.path):
        raise ConfigError(f"store is {text!r}; {forms}.")
    options = dict(parse_qsl(parts.query))
    allowed = ("segment", "host", "protocol") if parts.scheme == "mooncake" else ("bytes",)
    unknown = sorted(set(options) - set(allowed))
    if unknown:
        raise ConfigError(f"store {text!r} sets {unknown[0]}; after the question mark it takes {', '.join(allowed)}.")
    if parts.scheme != "mooncake":
        num_bytes = _size(text, "bytes", options.get("bytes", "0"))
        return ObjectStore(text.partition("?")[0], num_bytes)
    try:
        port = parts.port
    except ValueError:
        port = None
    if port is None or not parts.hostname:
        raise ConfigError(f"store is {text!r}; {forms}.")
    segment = _size(text, "segment", options.get("segment", str(SEGMENT_BYTES)))
    protocol = options.get("protocol", "tcp")
    if protocol not in ("tcp", "rdma"):
        raise ConfigError(f"store {text!r} sets protocol {protocol!r}; it must be tcp or rdma.")
    host = options.get("host") or ("127.0.0.1" if parts.hostname in LOOPBACK else "")
    if not host:
        raise ConfigError(
            f"store {text!r} is on another machine; add host=ADDRESS, under which it reaches this one, to the URL."
        )
    return MooncakeStore(parts.hostname, port, segment, host, protocol)


def check_host(num_bytes: object) -> None:
    """Raises ConfigError unless it is bytes, 0 for none."""
    valid = isinstance(num_bytes, int | float) and not isinstance(num_bytes, bool) and math.isfinite(num_bytes)
    if not valid or num_bytes < 0:  # pyright: ignore
        raise ConfigError(f"host_kv is {num_bytes!r}; it must be a number of bytes, 0 for none.")


def _size(text: str, option: str, value: str) -> int:
    number = _number(value)
    if not math.isfinite(number) or number < 0:
        raise ConfigError(f"store {text!r} sets {option}={value}; it must be a number of bytes, 0 for none.")
    return int(number)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan

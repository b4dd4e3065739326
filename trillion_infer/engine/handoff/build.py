"""From an engine that is ready to a worker of a pool."""

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trillion_infer.core.errors import ConfigError
from trillion_infer.engine.build import Blueprint
from trillion_infer.engine.engine import Engine
from trillion_infer.engine.handoff.decode import DecodeJobs
from trillion_infer.engine.handoff.prefill import PrefillJobs
from trillion_infer.engine.handoff.staging import PageStager
from trillion_infer.engine.handoff.worker import HandoffEngine, check_role
from trillion_infer.engine.pool_sides import pool_side
from trillion_infer.engine.timeline import Timeline
from trillion_infer.transfer.handoff.decode_side import DecodeSide
from trillion_infer.transfer.handoff.identity import Identity
from trillion_infer.transfer.handoff.limits import HandoffLimits
from trillion_infer.transfer.handoff.links import Links
from trillion_infer.transfer.handoff.prefill_side import PrefillSide
from trillion_infer.transfer.transports import make_transport
from trillion_infer.transfer.transports.base import Transport

MIN_KEY = 16


@dataclass(frozen=True)
class HandoffOptions:
    """A worker's place in its pools.

    role: prefill | decode | both. host, port: where other workers reach it (0: a free port). peers: HOST:PORT of
    prefill workers. key: what all workers share, at least 16 characters. transport: auto | jax | socket.
    """

    role: str
    key: str
    host: str = "127.0.0.1"
    port: int = 0
    peers: tuple[str, ...] = ()
    transport: str = "auto"
    limits: HandoffLimits = field(default_factory=HandoffLimits)

    def __post_init__(self) -> None:
        check_role(self.role)
        if len(self.key) < MIN_KEY:
            raise ConfigError(
                f"handoff_key has {len(self.key)} characters; give every worker the same key of {MIN_KEY} or more."
            )


def make_worker(
    engine: Engine,
    blueprint: Blueprint,
    fingerprint: bytes,
    options: HandoffOptions,
    transport: Transport | None = None,
) -> HandoffEngine:
    """Makes an engine a worker: compiles what moves pages, listens, dials its peers. Of an engine over several
    processes the leader is the worker, and the others repeat its calls.

    transport: instead of the one that `options` names. Raises ConfigError and OSError (the port is taken).
    """
    if not isinstance(engine, Engine):
        raise ConfigError("a worker with a role has one mesh; leave disaggregate out, or the role.")
    key = options.key.encode()
    transport = transport or make_transport(options.transport, key, options.host)
    stager = PageStager(pool_side(blueprint), engine.all_pools, engine.programs.recorder)
    engine.replace_pools(stager.warm_up(engine.all_pools))
    epoch, limits = secrets.token_hex(8), options.limits
    identity = Identity(
        f"{options.role}-{os.getpid()}", fingerprint.hex(), stager.specs(), epoch, transport.name, transport.address
    )
    links = Links(identity, key, options.host, options.port)
    timeline = Timeline(identity.name)
    prefill = PrefillJobs(engine, stager, transport, blueprint.family.config.vocab, timeline)
    decode = DecodeJobs(engine, stager, transport, limits, timeline)
    sides = (PrefillSide(limits, prefill), DecodeSide(epoch, limits, decode))
    jobs = (prefill, decode)
    return HandoffEngine(engine, options.role, links, transport, sides, jobs, timeline, options.peers)


def make_worker_of(llm: Any, options: HandoffOptions) -> HandoffEngine:
    """Makes an LLM's engine a worker, which its generator drives from then on; `make_worker` says what it raises."""
    worker = make_worker(llm.engine, llm.blueprint, llm.fingerprint, options)
    llm.engine = llm.generator.engine = worker
    return worker


def read_key(text: str | None) -> str:
    """A key, or the first line of @FILE. Raises ConfigError for none, OSError for a file that cannot be read."""
    if not text:
        raise ConfigError("--role needs --handoff_key: a key that all workers share, or @FILE that holds it.")
    if text.startswith("@"):
        return Path(text[1:]).read_text(encoding="utf-8").strip()
    return text


def split_addresses(text: str | Sequence[str]) -> tuple[str, ...]:
    """HOST:PORT items, checked. Raises ConfigError."""
    items = text.split(",") if isinstance(text, str) else text
    found = tuple(item.strip() for item in items if item.strip())
    for item in found:
        host, sep, port = item.rpartition(":")
        if not sep or not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"{item!r} is not HOST:PORT, the hand-off address of a prefill worker.")
    return found

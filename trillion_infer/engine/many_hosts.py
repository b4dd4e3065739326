"""An engine over several processes: one schedules, the others repeat its calls in lockstep."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from trillion_infer.core.errors import ConfigError, GroupError
from trillion_infer.core.request import Request
from trillion_infer.distributed.calls import Replayer
from trillion_infer.distributed.group import Follower, Leader
from trillion_infer.engine.bundle.identity import code_digest
from trillion_infer.engine.engine import Engine
from trillion_infer.engine.events import TokenEvent
from trillion_infer.engine.handoff.page_programs import PREFIX, PagePrograms
from trillion_infer.engine.programs import Programs
from trillion_infer.engine.state import DeviceState
from trillion_infer.speculate import parse_speculate
from trillion_infer.transfer.pages import PoolSide

COMPARE_EVERY = 16
"""Steps between two comparisons of the sampled ids."""


class LeadingEngine(Engine):
    """The engine of the process that schedules. Raises GroupError once a follower is lost."""

    def __init__(self, *args: Any, group: Leader, **options: Any):
        super().__init__(*args, **options)
        self.group = group
        self._compared = 0

    def step(self, waits: bool = True) -> list[TokenEvent]:
        with self.guarded():
            return super().step(waits)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        self.group.check()
        try:
            yield
        except jax.errors.JaxRuntimeError:
            self.group.explain()
            raise

    def _receive(self, pending: Any) -> list[TokenEvent]:
        events = super()._receive(pending)
        self._compared += 1
        if self._compared % COMPARE_EVERY == 1 and self.programs.recorder is not None:
            ids = pending.sampled.tokens if pending.bucket.verifies else pending.sampled.token
            self.programs.recorder.compare(self._compared, ids)
        return events

    def close(self) -> None:
        if self.group.lost is None:
            super().close()
        self.group.end()


class FollowingEngine:
    """The engine of any other process: it has the same programs, weights and pools, and no requests of its own.

    side: of the pools, whose pages the leader may hand to other engines.
    """

    has_work = False

    def __init__(self, programs: Programs, state: DeviceState, params: Any, group: Follower, side: PoolSide):
        self.programs, self.group = programs, group
        self._held = (params, state)
        self._pages = PagePrograms(side, state.kv_pools)
        self._replayer = Replayer(self._find, programs.mesh)
        self._replayer.know(self._held)

    def _find(self, name: str) -> Any:
        """The compiled program of a name."""
        return (self._pages if name.startswith(PREFIX) else self.programs).get(name).run

    def follow(self) -> None:
        """Repeats the leader's calls until it closes its engine. Raises GroupError where it is lost or differs."""
        while (message := self.group.receive())[0] != "end":
            try:
                why = self._replayer.obey(message)
            except Exception as error:
                self.group.explain()
                why = f"{type(error).__name__}: {error}"
            if why is not None:
                self.group.fail(why)
        self.close()

    def add(self, request: Request) -> None:
        raise GroupError(f"{self.group.name} follows; give requests to process 0, and call follow() here.")

    def abort(self, request_id: str) -> Request | None:
        return None

    def stats(self) -> dict[str, float]:
        return {"compilations": self.programs.compiled}

    def memory(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        self.group.end()
        for leaf in jax.tree.leaves(self._held):
            leaf.delete()


def check_options(options: Mapping[str, Any]) -> None:
    """Raises ConfigError for what an engine over several processes cannot do."""
    for name in ("disaggregate", "host_kv", "disk_kv", "store", "expert_memory"):
        if options.get(name):
            raise ConfigError(
                f"{name}={options[name]!r} does not work over several processes yet; leave it out, or use one process."
            )
    for drafter in parse_speculate(options.get("speculate")):
        if not drafter.on_host:
            raise ConfigError(
                f"speculate={drafter.kind} does not work over several processes yet; drafters on the host do."
            )


def plan_of(blueprint: Any, fingerprint: bytes) -> list[list[str]]:
    """What must be the same in every process, by name: programs that differ would wait for each other for ever."""
    config = dataclasses.asdict(blueprint.config)
    for name in ("compile_cache", "bundle", "precompile"):
        config.pop(name)
    return [
        ["version of jax", jax.__version__],
        ["code", code_digest()],
        ["mesh", ", ".join(f"{axis}={size}" for axis, size in blueprint.mesh.shape.items() if size > 1)],
        ["model", fingerprint.hex()],
        *([f"option {name}", repr(value)] for name, value in sorted(config.items())),
    ]

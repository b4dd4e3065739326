"""The thread that finds and reads stored blocks for requests that wait, so that no step waits for a tier."""

import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from trillion_infer.cache.tiers.base import BlockKey, Tier
from trillion_infer.cache.tiers.stack import TierStack

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Lookup:
    """Where blocks are stored. `found` stays None until the thread has looked; then it maps those that are."""

    keys: list[BlockKey]
    found: dict[BlockKey, Tier] | None = None
    cancelled: bool = False


@dataclass(frozen=True)
class Batch:
    """Parts of blocks of one group that were read: bytes and the tier they came from, None for what was lost."""

    keys: list[BlockKey]
    contents: list[tuple[bytes, Tier] | None]


@dataclass(eq=False)
class Load:
    """Parts of blocks on their way to host memory, a batch after the other. The thread fills `ready`."""

    batches: list[list[BlockKey]]
    found: dict[BlockKey, Tier]
    ready: "queue.SimpleQueue[Batch]" = field(default_factory=queue.SimpleQueue)
    cancelled: bool = False


class Fetcher:
    """Works jobs off in the order given. Cancelled jobs are passed over; nothing here raises.

    AHEAD batches of a job may wait to be taken, so that a fast tier does not fill host memory.
    """

    AHEAD = 8

    def __init__(self, stack: TierStack):
        self._stack = stack
        self._jobs: queue.SimpleQueue[Lookup | Load | None] = queue.SimpleQueue()
        self._progress = threading.Event()
        self._current: Lookup | Load | None = None
        self._thread = threading.Thread(target=self._run, name="kv-fetch", daemon=True)
        self._thread.start()

    @property
    def is_stuck(self) -> bool:
        """A job that nobody wants any more has not come back: more jobs would wait for it."""
        current = self._current
        return current is not None and current.cancelled

    def submit(self, job: Lookup | Load) -> None:
        self._jobs.put(job)

    def wait(self, seconds: float) -> None:
        """Returns when something came since the last call, at the latest after `seconds`."""
        self._progress.wait(seconds)
        self._progress.clear()

    def close(self) -> None:
        """Ends the thread, unless it is stuck."""
        self._jobs.put(None)
        self._thread.join(1.0 if self.is_stuck else 30.0)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._current = job
            try:
                if isinstance(job, Lookup):
                    job.found = {} if job.cancelled else self._stack.locate(job.keys)
                    self._progress.set()
                else:
                    self._read(job)
            except Exception:
                _log.exception("KV tiers: stored blocks could not be read; they are computed again")
                self._give_up(job)
            self._current = None

    def _read(self, job: Load) -> None:
        for keys in job.batches:
            while job.ready.qsize() >= self.AHEAD and not job.cancelled:
                time.sleep(0.002)
            if job.cancelled:
                return
            job.ready.put(Batch(keys, self._stack.read(keys, job.found)))
            self._progress.set()

    def _give_up(self, job: Lookup | Load) -> None:
        if isinstance(job, Lookup):
            job.found = {}
        else:
            for keys in job.batches:
                job.ready.put(Batch(keys, [None] * len(keys)))
        self._progress.set()


def in_batches(units: Sequence[int], names: Sequence[bytes], size: int) -> list[list[BlockKey]]:
    """The keys of these units of blocks, all units of at most `size` blocks together."""
    runs = (names[start : start + size] for start in range(0, len(names), size))
    return [[(unit, name) for name in run for unit in units] for run in runs]

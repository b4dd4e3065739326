"""Work that goes on behind an engine that answers already, one item after the other."""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from trillion_infer.engine.compile_cache import COMPILER

_LOG = logging.getLogger(__name__)


class Behind:
    """A thread that calls `make(name)` for each name, in order, and `then()` at the end.

    It ends early, after the item it is at, when it is stopped or the process's main thread has ended; whoever needs an
    item before its turn makes it himself (`take`). An item that fails is logged and left to who needs it.
    """

    def __init__(self, names: Sequence[str], make: Callable[[str], None], then: Callable[[], None]):
        self._make, self._then = make, then
        self._left: dict[str, Future[None]] = {name: Future() for name in names}
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=f"{COMPILER}-behind")

    def start(self) -> None:
        self._thread.start()

    @property
    def left(self) -> frozenset[str]:
        """Names of what is not made yet."""
        return frozenset(self._left)

    def take(self, name: str) -> None:
        """Waits for what is being made under this name; what is not is the caller's from here on."""
        future = self._left.get(name)
        if future is not None and not future.cancel():
            future.result()
        self._left.pop(name, None)

    def wait(self) -> None:
        """Until all is made, or it was stopped."""
        self._thread.join()

    def stop(self) -> None:
        """Nothing is begun from here on; waits for what is under way."""
        self._stopped = True
        self.wait()

    def _run(self) -> None:
        try:
            for name, future in list(self._left.items()):
                if self._stopped or not threading.main_thread().is_alive():
                    break
                if future.set_running_or_notify_cancel():
                    self._do(name, future)
        finally:
            self._left.clear()
            self._then()

    def _do(self, name: str, future: "Future[Any]") -> None:
        try:
            self._make(name)
        except Exception:
            _LOG.exception("%s failed behind the engine; it is tried again when it is needed.", name)
        self._left.pop(name, None)
        future.set_result(None)

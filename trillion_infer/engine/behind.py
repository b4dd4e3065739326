"""Work that goes on behind an engine that answers already, one item after the other."""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from trillion_infer.engine.compile_cache import COMPILER

_LOG = logging.getLogger(__name__)


class Behind:
    """A thread that calls `make(name)` for each name, in order, and `then()` at the end.

    It ends early, after the item it is at, when it is stopped or the process's main thread has ended. Whoever needs an
    item before its turn has it made by his own thread (`need`). An item that fails is logged and not tried again here.
    """

    def __init__(self, names: Sequence[str], make: Callable[[str], None], then: Callable[[], None]):
        self._make, self._then = make, then
        self._left: dict[str, Future[None]] = {name: Future() for name in names}
        self._begun: set[str] = set()
        self._beginning = threading.Lock()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=f"{COMPILER}-behind")

    def start(self) -> None:
        self._thread.start()

    @property
    def left(self) -> frozenset[str]:
        """Names of what is not made yet."""
        return frozenset(self._left)

    def need(self, name: str) -> None:
        """Returns when this item is made, or failed, or if it is none of those left; nobody begins it twice."""
        future = self._left.get(name)
        if future is None:
            return
        with self._beginning:
            begun = name in self._begun
            self._begun.add(name)
        if begun:
            future.result()
            return
        try:
            self._make(name)
        except Exception:
            _LOG.exception("%s failed behind the engine; it is tried again when it is needed.", name)
        finally:
            self._left.pop(name, None)
            future.set_result(None)

    def wait(self) -> None:
        """Until all is made, or it was stopped."""
        self._thread.join()

    def stop(self) -> None:
        """Nothing is begun from here on; waits for what is under way."""
        self._stopped = True
        self.wait()

    def _run(self) -> None:
        try:
            for name in list(self._left):
                if self._stopped or not threading.main_thread().is_alive():
                    break
                self.need(name)
        finally:
            self._left.clear()
            self._then()

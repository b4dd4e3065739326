"""Importing much at once without what only slows it."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def resting_collector() -> Iterator[None]:
    """While entered, no garbage is collected: each collection would visit all that has just been made to stay."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def without_shell() -> Iterator[None]:
    """While entered, IPython cannot be imported, unless it is already: flax asks it which shell it runs in, and where
    nobody has loaded it that is none."""
    if "IPython" in sys.modules or "flax" in sys.modules:
        yield
        return
    sys.modules["IPython"] = None  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        del sys.modules["IPython"]

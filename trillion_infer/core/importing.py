"""Importing much at once without what only slows it."""

import gc
import importlib.metadata
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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


@contextmanager
def without_scan() -> Iterator[None]:
    """While entered, a walk over what is installed meets jax's own distributions alone: jax looks for a plugin by
    reading the description of every package there is, 60 ms where there are a hundred."""
    every = importlib.metadata.distributions

    def of_jax(**kwargs: Any) -> Iterator[importlib.metadata.Distribution]:
        for distribution in every(**kwargs):
            path = getattr(distribution, "_path", None)
            if path is None or path.name.startswith("jax"):
                yield distribution

    importlib.metadata.distributions = of_jax  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        importlib.metadata.distributions = every

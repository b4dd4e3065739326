"""Importing much at once without what only slows it."""

import gc
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

ON_USE = frozenset({"filelock"})
"""What jax imports for a compile cache of limited size alone."""


@contextmanager
def quick_imports() -> Iterator[None]:
    """While entered, importing jax or flax leaves out what nothing here needs, and what is left out is imported when
    somebody uses it. Nothing stays changed but what was imported.

    It changes what the whole process sees, so it does nothing in other threads than the main one, beside which a
    program of somebody else may be importing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with ExitStack() as stack:
        for each in (resting_collector(), without_shell(), without_scan(), on_use(ON_USE)):
            stack.enter_context(each)
        yield


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
    """While entered, IPython and pygments cannot be imported, unless they are already: flax asks which shell it runs
    in, and jax's debugger for notebooks how to colour code; where nobody has loaded them the answer is no."""
    names = [name for name in ("IPython", "pygments") if name not in sys.modules]
    sys.modules.update(dict.fromkeys(names))  # pyright: ignore[reportCallIssue, reportArgumentType]
    try:
        yield
    finally:
        for name in names:
            if sys.modules.get(name) is None:
                sys.modules.pop(name, None)


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


@contextmanager
def on_use(names: frozenset[str]) -> Iterator[None]:
    """While entered, importing one of these modules gives it at once, and runs its code when an attribute of it is
    first asked for."""
    finder = _OnUse(names)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _OnUse(importlib.abc.MetaPathFinder):
    def __init__(self, names: frozenset[str]):
        self._names = names

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._names:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = importlib.util.LazyLoader(spec.loader)
        return spec

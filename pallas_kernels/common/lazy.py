"""Backends imported when they are first asked: Pallas takes tenths of a second that a CPU need not wait for."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


class LazyModule:
    """Stands for a module until an attribute of it is wanted."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


def names_on_use(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose names are imported when they are first asked for: name to its module."""

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)

    return find

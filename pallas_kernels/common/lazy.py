"""Backends imported when they are first asked: Pallas takes tenths of a second that a CPU need not wait for."""

import importlib
from typing import Any


class LazyModule:
    """Stands for a module until an attribute of it is wanted."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)

"""Takes the case builders that stand beside the tests of the other backends."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load_module(path: str) -> ModuleType:
    """The module in a file below tests/kernels, under a name of its own."""
    file = Path(__file__).parent.parent / path
    spec = importlib.util.spec_from_file_location(f"native_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module

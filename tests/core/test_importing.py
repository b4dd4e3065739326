"""Imports are quick where nobody else's can meet what that changes."""

import importlib.metadata
import sys
import threading

from trillion_infer.core.importing import quick_imports


def seen_while_importing() -> tuple[bool, object]:
    with quick_imports():
        return sys.modules.get("IPython", True) is None, importlib.metadata.distributions


def test_what_a_thread_imports_changes_nothing_for_others():
    every, found = importlib.metadata.distributions, []
    thread = threading.Thread(target=lambda: found.append(seen_while_importing()))
    thread.start()
    thread.join()
    assert found == [(False, every)]


def test_all_is_as_before_once_the_main_thread_has_imported():
    every = importlib.metadata.distributions
    assert seen_while_importing()[1] is not every
    assert importlib.metadata.distributions is every
    assert sys.modules.get("IPython", True) is not None

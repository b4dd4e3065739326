import subprocess
import sys
import textwrap

import pytest

from tests.environment import environment


@pytest.fixture
def run_python():
    """Runs source in a process of its own with eight CPU devices; returns what it prints."""

    def run(source: str) -> str:
        command = [sys.executable, "-c", textwrap.dedent(source)]
        done = subprocess.run(command, env=environment(8), capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run

"""Every curl in the documentation works as it stands, but for the address."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.serve.serving import MARKED, serving

ROOT = Path(__file__).parents[2]
KEY = "export KEY='Authorization: Bearer KEY1'"
CURL = re.compile(r"^curl (?:.(?!^curl ))*", re.MULTILINE | re.DOTALL)


def curls(name):
    """The commands of a page's code blocks that start with curl, each up to the next."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", (ROOT / name).read_text(), re.MULTILINE | re.DOTALL)
    return [command.strip() for block in blocks for command in CURL.findall(block)]


COMMANDS = [
    pytest.param(c, id=f"{name}-{i}") for name in ("README.md", "docs/serving.md") for i, c in enumerate(curls(name))
]

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


@pytest.fixture(scope="module")
def served():
    with serving("fine", MARKED, {"model_name": "MODEL", "api_keys": ("KEY1",)}) as served:
        yield served


def test_there_are_commands_to_run():
    assert len(COMMANDS) >= 8


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_documentation_works(served, command):
    command = command.replace("http://127.0.0.1:8000", served.url)
    done = subprocess.run(
        ["bash", "-c", f"{KEY}; {command} --fail-with-body -sS"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    if '"stream": true' in command:
        assert done.stdout.endswith("data: [DONE]\n\n")
    elif "/metrics" in command:
        assert "vllm:num_requests_running" in done.stdout
    else:
        assert not json.loads(done.stdout).get("error")

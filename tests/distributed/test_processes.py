"""Two real processes with four devices each: the tokens of one device, and a clear end when one of them is lost."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import GOLDEN
from tests.distributed.group_process import GREEDY, OPTIONS, PROMPTS
from tests.engine.helpers import tokens_of
from tests.environment import environment
from trillion_infer.testing.ports import free_port

SCRIPT = Path(__file__).with_name("group_process.py")


class Pair:
    """A leader and a follower; what they say is in files of `folder`."""

    def __init__(self, folder: Path, model: str, mesh: str, keys: tuple[str, ...] = (), **env: str):
        port = str(free_port())
        self.folder, self.processes = folder, []
        for rank in range(2):
            command = [sys.executable, str(SCRIPT), str(rank), port, str(GOLDEN / "tiny" / model), mesh]
            self.processes.append(
                subprocess.Popen(
                    command + ([keys[rank]] if keys else []),
                    env=environment(4, **env),
                    stdout=(folder / f"out{rank}").open("w"),
                    stderr=(folder / f"err{rank}").open("w"),
                )
            )

    def said(self, rank: int, stream: str = "out") -> str:
        return (self.folder / f"{stream}{rank}").read_text()

    def wait(self, rank: int, seconds: float) -> int:
        return self.processes[rank].wait(timeout=seconds)

    def wait_for(self, text: str, seconds: float) -> None:
        """Until the leader has said `text`."""
        end = time.monotonic() + seconds
        while text not in self.said(0):
            assert self.processes[0].poll() is None, self.said(0, "err")
            assert time.monotonic() < end, self.said(0, "err")
            time.sleep(0.1)

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.fixture
def start(tmp_path):
    """Starts a Pair; whatever is left of it is ended after the test."""
    started: list[Pair] = []

    def make(*args, **env) -> Pair:
        started.append(Pair(tmp_path, *args, **env))
        return started[-1]

    yield make
    for pair in started:
        pair.kill()


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        ("smollm2", "tensor=8"),
        ("deepseek_v3", "stage=2,tensor=2,expert=2"),
        pytest.param("llama4_scout", "data=2,tensor=4", marks=pytest.mark.slow),
    ],
)
def test_two_processes_give_the_tokens_of_one_device(make_llm, start, model, mesh):
    """Whole, streamed while another request is aborted, and again after that."""
    pair = start(model, mesh)
    expected = tokens_of(make_llm(model, **OPTIONS, precompile=False).generate(PROMPTS, GREEDY))
    assert [pair.wait(rank, 400) for rank in range(2)] == [0, 0], pair.said(0, "err") + pair.said(1, "err")
    found = json.loads(pair.said(0).splitlines()[-1])
    assert found == {"first": expected, "streamed": expected[1], "again": expected}


@pytest.mark.parametrize(("victim", "lost"), [(1, "process 1"), (0, "the leader, process 0,")])
def test_a_process_that_is_killed_ends_the_other(start, victim, lost):
    pair = start("smollm2", "tensor=8", ENDLESS="1")
    pair.wait_for("answering", 400)
    pair.processes[victim].send_signal(signal.SIGKILL)
    assert pair.wait(1 - victim, 60) not in (0, None)
    assert lost in pair.said(1 - victim, "err")
    assert "is lost" in pair.said(1 - victim, "err")


def test_a_wrong_key_is_refused(start, tmp_path):
    keys = tmp_path / "right", tmp_path / "wrong"
    for key in keys:
        key.write_text(f"the {key.name} key of a test")
    pair = start("smollm2", "tensor=8", tuple(map(str, keys)))
    assert pair.wait(1, 200) != 0
    assert "refused the key" in pair.said(1, "err")
    assert pair.wait(0, 60) != 0
    assert "it has another key" in pair.said(0, "err")


def test_processes_that_plan_different_engines_say_what_differs(start):
    pair = start("smollm2", "tensor=8", OPTIONS_1='{"prefill_chunk": 16}')
    for rank in range(2):
        assert pair.wait(rank, 200) != 0
        assert "option prefill_chunk is 16, the leader's is 32" in pair.said(rank, "err")


def test_a_mesh_that_leaves_a_process_out_is_refused(start):
    pair = start("smollm2", "tensor=4")
    for rank in range(2):
        assert pair.wait(rank, 200) != 0
        assert "use devices of every process (8 in all)" in pair.said(rank, "err")

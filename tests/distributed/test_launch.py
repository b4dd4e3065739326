"""generate.py on two hosts, started by hand and by the pod's launcher, writes what it writes on one."""

import json
import subprocess
import sys

import pytest

from tests.conftest import GOLDEN
from tests.environment import ROOT, environment
from trillion_infer.testing.ports import free_port

PROMPTS = [[5, 9, 11], [7] * 20, [100]]


def run(count: int, launcher: list[str], arguments: list[str]) -> list[tuple[int, str]]:
    """Status and standard error of each of `count` processes with two devices."""
    port = free_port()
    flags = [f"--coordinator=127.0.0.1:{port}", f"--num_processes={count}"] if count > 1 else []
    started = []
    for rank in range(count):
        own = [*flags, f"--process_id={rank}"] if count > 1 else []
        command = [*launcher, *own, "--", "scripts/generate.py"] if launcher else ["scripts/generate.py", *own]
        started.append(
            subprocess.Popen(
                [sys.executable, *command, *arguments],
                cwd=ROOT,
                env=environment(2 // count),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        return [(process.wait(400), process.communicate()[1]) for process in started]
    finally:
        for process in started:
            process.kill()


@pytest.mark.parametrize("launcher", [[], ["deploy/tpu_pod.py"]], ids=["by hand", "tpu_pod.py"])
def test_two_hosts_write_what_one_writes(tmp_path, launcher):
    prompts = tmp_path / "in.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_token_ids": ids}) + "\n" for ids in PROMPTS))
    written = []
    for count in (1, 2):
        output = tmp_path / f"out{count}.jsonl"
        found = run(
            count,
            launcher if count > 1 else [],
            [
                f"--model={GOLDEN / 'tiny' / 'smollm2'}",
                f"--prompts={prompts}",
                f"--output={output}",
                "--max_tokens=5",
                "--mesh=tensor=2",
                "--dtype=float32",
                "--noprecompile",
                "--max_running=4",
                "--kv_memory=4e6",
            ],
        )
        assert [status for status, _ in found] == [0] * count, "\n".join(err for _, err in found)
        written.append(output.read_text())
    assert written[0] == written[1]
    assert len(written[0].splitlines()) == len(PROMPTS)


def test_flags_that_do_not_go_together_are_one_line():
    ((status, err),) = run(1, [], ["--model=none", "--prompt=x", "--coordinator=127.0.0.1:1"])
    assert status == 2
    assert err.strip() == "error: coordinator, num_processes and process_id go together; give all of them or none."

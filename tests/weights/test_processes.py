"""Processes of one program each read only the tensors of their own shards."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.environment import environment
from trillion_infer.testing.checkpoints import write_hf_directory
from trillion_infer.testing.ports import free_port


def test_two_processes_read_half_each(tmp_path):
    tensors = {f"w.{i}": np.full((16, 8), i, np.float32) for i in range(4)} | {"n": np.arange(8, dtype=np.float32)}
    write_hf_directory(tmp_path, tensors, {}, shards=2)
    port = free_port()
    script = Path(__file__).with_name("load_process.py")
    running = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(port), tmp_path],
            env=environment(2),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [json.loads(process.communicate(timeout=300)[0].splitlines()[-1]) for process in running]
    half = 2 * 16 * 8 * 4 + 8 * 4
    assert said == [{"bytes": half, "right": True, "shape": [4, 16, 8]}] * 2

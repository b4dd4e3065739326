"""A large sharded checkpoint loads with bounded host memory (see load_big.py, which also prints the speed)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_four_gigabytes_take_less_than_one_gibibyte_beyond_the_arrays(tmp_path):
    script = Path(__file__).with_name("load_big.py")
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, script, tmp_path, "4.1"], env=env, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["gb"] >= 4.0
    assert result["same"]
    assert result["beyond_arrays_gib"] < 1.0

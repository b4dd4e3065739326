"""Start-up: seconds from starting a process to its first token."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from trillion_infer.core.errors import TrillionInferError


def startup(options: Mapping[str, Any], prompt: Sequence[int], repeats: int = 1) -> dict[str, float]:
    """startup_cold_s without compiled programs, then startup_s, the best of `repeats` with the bundle that this left.

    A cold start compiles on after its first token, and the next begins when the bundle is whole.
    Both find the model's file in the system's page cache and the native kernels built. `options`: keywords of LLM.
    """
    with tempfile.TemporaryDirectory(prefix="trillion_infer_cold_") as cache:
        fresh = {**options, "compile_cache": f"{cache}/xla", "bundle": f"{cache}/bundles"}
        cold = first_token_s(fresh, prompt)
        return {"startup_cold_s": cold, "startup_s": min(first_token_s(fresh, prompt) for _ in range(repeats))}


def first_token_s(options: Mapping[str, Any], prompt: Sequence[int]) -> float:
    """Seconds until a new process has printed a token. Raises TrillionInferError with its last words if it fails."""
    request = json.dumps({"options": dict(options), "prompt_token_ids": list(prompt)})
    command = [sys.executable, "-m", "trillion_infer.benchmark.first_token", request]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as said:
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True) as process:
            line = process.stdout.readline() if process.stdout else ""
            took = time.perf_counter() - start
        said.seek(0)
        words = said.read().strip().splitlines()
    if not line.strip().isdigit():
        raise TrillionInferError(f"the start-up process gave no token: {words[-1] if words else 'it said nothing'}")
    return took

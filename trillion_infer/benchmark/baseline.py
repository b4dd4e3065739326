"""transformers on torch on the CPU, on the same token ids, run by an interpreter that has them."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trillion_infer.benchmark.records import UNITS, Record, record
from trillion_infer.core.errors import ConfigError

SCRIPT = Path(__file__).parents[2] / "tests" / "oracle" / "torch_baseline.py"
_DTYPES = {"bfloat16": "bf16", "float32": "f32"}
_PROBE = "import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ('torch', 'transformers'))))"


class BaselineUnavailable(Exception):
    """Why the baseline does not run here, in a sentence."""


def find_python(asked: str | None) -> str:
    """An interpreter that has torch and transformers: `asked`, or the current one when nothing is asked.

    Raises ConfigError if `asked` has not, BaselineUnavailable if nothing was asked and the current one has not.
    """
    if asked == "":
        raise BaselineUnavailable("it was switched off with --torch_python=")
    python = asked or sys.executable
    try:
        found = subprocess.run([python, "-c", _PROBE], capture_output=True, timeout=60, check=False).returncode == 0
    except OSError as error:
        raise ConfigError(f"torch_python is {python!r}, which does not run: {error.strerror}.") from error
    if found:
        return python
    if asked:
        raise ConfigError(f"torch_python is {python!r}, which cannot import torch and transformers; name one that can.")
    raise BaselineUnavailable("torch and transformers are not installed; name a Python that has them: --torch_python=…")


def run_baseline(
    python: str, model: str, dtype: str, work: Mapping[str, Any], repeats: int, script: Path = SCRIPT
) -> Iterator[Record]:
    """Records of transformers as they come. `work`: see Work.for_baseline.

    Raises BaselineUnavailable if the script is not here (it comes with the source, not with the wheel) or fails.
    """
    if not script.exists():
        raise BaselineUnavailable(f"{script} is not here; it comes with the source")
    with (
        tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file,
        tempfile.TemporaryFile("w+", encoding="utf-8") as said,
    ):
        json.dump(work, file)
        file.flush()
        arguments = [f"--model={model}", f"--work={file.name}", f"--dtype={_DTYPES[dtype]}", f"--repeats={repeats}"]
        # Through a shell that stays: a process started directly would inherit the peak memory of this one.
        command = ["sh", "-c", '"$@"; exit $?', "sh", python, str(script), *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True) as process:
            for line in process.stdout or ():
                row = json.loads(line)
                if row["metric"] in UNITS:
                    yield record(row["engine"], row["metric"], row["value"], dtype, row["model"])
        if process.returncode != 0:
            said.seek(0)
            words = said.read().strip().splitlines() or ["it said nothing"]
            raise BaselineUnavailable(f"{script.name} failed: {words[-1]}")

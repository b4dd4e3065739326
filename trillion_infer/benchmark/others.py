"""Engines beside transformers on the same prompts: which there are, and whether an interpreter has them."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trillion_infer.benchmark.baseline import BaselineUnavailable
from trillion_infer.core.errors import ConfigError

_FOLDER = Path(__file__).parents[2] / "benchmarks" / "engines"


@dataclass(frozen=True)
class OtherEngine:
    """modules: what its interpreter must have. script: prints its figures. takes_gguf: it reads GGUF files."""

    name: str
    modules: tuple[str, ...]
    script: Path
    takes_gguf: bool = True


OTHERS: Mapping[str, OtherEngine] = {
    engine.name: engine
    for engine in (
        OtherEngine("llama_cpp", ("xllamacpp",), _FOLDER / "llama_library.py"),
        OtherEngine("llama_server", ("xllamacpp",), _FOLDER / "llama_server.py"),
        OtherEngine("vllm", ("vllm",), _FOLDER / "vllm.py", takes_gguf=False),
    )
}


def interpreter_of(engine: OtherEngine, asked: str | None, model: str) -> str:
    """An interpreter that has the engine: `asked`, or this one when nothing is asked.

    Raises ConfigError if `asked` has not, BaselineUnavailable with the reason where the engine is absent or unfit.
    """
    if asked == "":
        raise BaselineUnavailable("it was switched off")
    if model.endswith(".gguf") and not engine.takes_gguf:
        raise BaselineUnavailable(
            f"it does not read this GGUF file; give a Hugging Face folder with --{engine.name}_model=…"
        )
    python = asked or sys.executable
    probe = f"import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, {engine.modules!r})))"
    try:
        # From the root folder: a script's own name must not pass for the module.
        done = subprocess.run([python, "-c", probe], capture_output=True, timeout=60, check=False, cwd="/")
    except OSError as error:
        raise ConfigError(f"{engine.name}_python is {python!r}, which does not run: {error.strerror}.") from error
    if done.returncode == 0:
        return python
    missing = " and ".join(engine.modules)
    if asked:
        raise ConfigError(f"{engine.name}_python is {python!r}, which cannot import {missing}; name one that can.")
    raise BaselineUnavailable(f"{missing} is not installed; name a Python that has it: --{engine.name}_python=…")

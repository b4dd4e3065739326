"""Real worker and router processes of a tiny model, on loopback."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.conftest import GOLDEN
from tests.environment import ROOT, environment

KEY = "the key of the workers of a test"
ADMIN = {"authorization": "Bearer admin-key-of-tests"}
START_S = 600.0
NAME = "tiny"


def tiny_model(path: Path, model: str = "smollm2") -> Path:
    """A tiny model with a tokenizer of its 128 ids: one ASCII character each."""
    path.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "tiny" / model / name, path / name)
    vocab = {chr(i) if 33 <= i < 127 else chr(256 + i): i for i in range(128)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(path / "tokenizer.json"))
    return path


@dataclass
class Process:
    """A script that runs, with what it has printed so far."""

    command: list[str]
    child: subprocess.Popen = field(init=False)
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.child = subprocess.Popen(
            [sys.executable, *self.command],
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.child.stdout or ():
            self.lines.append(line.rstrip())

    def kill(self) -> None:
        """As a machine dies: no goodbye."""
        os.kill(self.child.pid, signal.SIGKILL)
        self.child.wait(20)

    def tail(self) -> str:
        return "\n".join(self.lines[-20:])


def wait_until(condition, seconds: float, what) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what() if callable(what) else what
        time.sleep(0.05)


class Worker:
    """scripts/serve.py with a role. A restart takes the same ports. coordinator: a port at which two processes with a
    device each meet, which are the worker together."""

    def __init__(self, model: Path, role: str, http: int, handoff: int, *flags: str, coordinator: int | None = None):
        self.role, self.url, self.handoff = role, f"http://127.0.0.1:{http}", f"127.0.0.1:{handoff}"
        meet = (f"--coordinator=127.0.0.1:{coordinator}", "--num_processes=2")
        self._own = [[]] if coordinator is None else [[*meet, f"--process_id={rank}"] for rank in range(2)]
        self._command = [
            "scripts/serve.py",
            f"--model={model}",
            f"--served_model_name={NAME}",
            f"--port={http}",
            f"--role={role}",
            f"--handoff_port={handoff}",
            f"--handoff_key={KEY}",
            "--admin_key=admin-key-of-tests",
            "--dtype=float32",
            "--max_running=8",
            "--prefill_chunk=64",
            "--page_size=8",
            "--kv_memory=8e6",
            "--lease_s=6",
            "--silence_s=3",
            "--beat_s=0.3",
            "--deadline_s=30",
            *flags,
        ]
        self.start()

    def start(self) -> None:
        self.processes = [Process([*self._command, *own]) for own in self._own]

    @property
    def process(self) -> Process:
        """The one that leads."""
        return self.processes[0]

    @property
    def is_ready(self) -> bool:
        for process in self.processes:
            if process.child.poll() is not None:
                raise AssertionError(process.tail())
        return self.state() is not None

    def state(self) -> dict | None:
        """What /health says; None while it does not answer."""
        try:
            answer = httpx.get(f"{self.url}/health", timeout=5)
        except httpx.TransportError:
            return None
        return answer.json() if answer.status_code == 200 else None

    def wait(self) -> "Worker":
        wait_until(lambda: self.is_ready, START_S, lambda: self.process.tail())
        return self

    def metric(self, name: str) -> float:
        """A figure of /metrics, over all labels."""
        lines = httpx.get(f"{self.url}/metrics", timeout=10).text.splitlines()
        return sum(
            float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name}_total{{"))
        )

    def kill(self) -> None:
        self.process.kill()

    def end(self) -> None:
        """Whatever of it still runs."""
        for process in self.processes:
            if process.child.poll() is None:
                process.kill()


class RouterProcess:
    """scripts/route.py over pools."""

    def __init__(self, prefill: list[Worker], decode: list[Worker], *flags: str):
        self.process = Process(
            [
                "scripts/route.py",
                f"--prefill={','.join(worker.url for worker in prefill)}",
                f"--decode={','.join(worker.url for worker in decode)}",
                "--port=0",
                "--on_worker_failure=replay",
                "--health_interval_s=0.2",
                "--breaker_cooldown_s=0.5",
                "--max_attempts=6",
                *flags,
            ]
        )
        wait_until(lambda: any("routing on" in line for line in self.process.lines), 60, lambda: self.process.tail())
        line = next(line for line in self.process.lines if "routing on" in line)
        self.url = line.split()[2]


def body(prompt: str, max_tokens: int, seed: int | None = None, **more) -> dict:
    sampling = {"temperature": 0} if seed is None else {"temperature": 0.8, "seed": seed}
    return {"model": NAME, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **sampling, **more}


def streamed(url: str, request: dict, timeout_s: float = 120) -> Generator[dict, None, None]:
    """Events of a stream; an answer that is not 200 is one event with an error."""
    with httpx.stream("POST", f"{url}/v1/completions", json={**request, "stream": True}, timeout=timeout_s) as answer:
        if answer.status_code != 200:
            answer.read()
            yield {"error": answer.json()["error"]}
            return
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line[6:])


@dataclass
class Outcome:
    """What a client got: text, and why it ended."""

    text: str = ""
    reason: str | None = None
    error: str | None = None
    seconds: float = 0.0


def fetch(url: str, request: dict) -> Outcome:
    """Runs a stream to its end."""
    outcome, began = Outcome(), time.monotonic()
    try:
        for event in streamed(url, request):
            if "error" in event:
                outcome.error = str(event["error"].get("message"))
            for choice in event.get("choices", ()):
                outcome.text += choice.get("text") or ""
                outcome.reason = choice.get("finish_reason") or outcome.reason
    except httpx.HTTPError as error:
        outcome.error = f"the connection broke: {error!r}"
    outcome.seconds = time.monotonic() - began
    return outcome

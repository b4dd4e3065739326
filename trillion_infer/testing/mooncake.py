"""A real Mooncake master of one's own, on free ports of the loopback: for tests and measurements."""

import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from trillion_infer.testing.ports import free_port


def master_program() -> str | None:
    """Path of the program, which comes with the package; None where it is not installed."""
    beside = Path(sys.executable).with_name("mooncake_master")
    return str(beside) if beside.exists() else shutil.which("mooncake_master")


class Master:
    """Starts at once; `kill` and `start` again on the same port."""

    def __init__(self, *options: str):
        self.port, self._metrics = free_port(), free_port()
        self._options = options
        self._process: subprocess.Popen | None = None
        self.start()

    def url(self, **options: object) -> str:
        query = "&".join(f"{name}={value}" for name, value in options.items())
        return f"mooncake://127.0.0.1:{self.port}" + (f"?{query}" if query else "")

    def start(self) -> None:
        program = master_program()
        assert program is not None
        ports = [f"--port={self.port}", f"--metrics_port={self._metrics}"]
        hosts = ["--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1", "--http_metadata_server_host=127.0.0.1"]
        self._process = subprocess.Popen(
            [program, *ports, *hosts, *self._options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", self.port), 0.2).close()
                return
            except OSError:
                time.sleep(0.05)
        raise AssertionError("mooncake_master does not listen")

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

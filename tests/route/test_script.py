"""scripts/route.py as users run it."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from tests.route.conftest import stream_events, text_of, wait_until
from tests.route.fake_worker import FakeWorker, answer_words

REPOSITORY = Path(__file__).parents[2]
SCRIPT = [sys.executable, str(REPOSITORY / "scripts" / "route.py")]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no worker is given"),
        (["--workers=localhost:8000"], "not a base URL"),
        (["--prefill=http://a:1"], "--decode is empty"),
        (["--decode=http://a:1", "--workers=http://b:1"], "--workers for servers without roles"),
        (["--workers=http://a:1", "--on_worker_failure=again"], "error, replay|<error|replay>"),
        (["--workers=http://a:1", "--max_attempts=0"], "at least 1"),
        (["--workers=http://a:1", "--idle_timeout_s=nan"], "positive"),
    ],
)
def test_bad_flags_end_with_one_clear_line(arguments, says):
    result = subprocess.run([*SCRIPT, *arguments], capture_output=True, text=True, timeout=60)
    assert result.returncode != 0
    assert any(part in result.stderr + result.stdout for part in says.split("|", 1)), result.stderr
    assert "Traceback" not in result.stderr


def test_a_taken_port_is_one_line(serve):
    port = serve(FakeWorker().app()).url.rpartition(":")[2]
    result = subprocess.run(
        [*SCRIPT, "--workers=http://a:1", f"--port={port}"], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2
    assert result.stderr.startswith("error: "), result.stderr
    assert "Traceback" not in result.stderr


def test_sigterm_lets_a_stream_end_and_takes_no_new_requests(serve):
    fake = FakeWorker(token_s=0.02)
    url = serve(fake.app()).url
    command = [*SCRIPT, f"--workers={url}", "--port=0"]
    router = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        address = router.stdout.readline().split()[2]
        wait_until(lambda: _answers(address))
        got: list = []
        with httpx.Client(base_url=address, timeout=30) as client:
            thread = threading.Thread(
                target=lambda: got.extend(stream_events(client, prompt="p", max_tokens=100)), daemon=True
            )
            thread.start()
            wait_until(lambda: fake.running == 1)
            router.send_signal(signal.SIGTERM)
            wait_until(lambda: not _answers(address))
            assert fake.running == 1
            thread.join()
        assert text_of(got) == "".join(answer_words("p", 100))
        _, log = router.communicate(timeout=20)
        assert router.returncode in (0, -signal.SIGTERM)
        assert '"path": "/v1/completions"' in log
    finally:
        router.kill()
        router.wait()


def _answers(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False

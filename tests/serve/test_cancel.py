"""Requests whose client goes away, or who are aborted, are gone within two steps."""

import json
import socket
import threading
import time

import pytest

from tests.serve.serving import MODEL, letters, serving

SLOW_STEP = 0.03


class Paced:
    """A script of letters that counts the tokens it has chosen, slowly enough for a socket to be closed between."""

    def __init__(self):
        self.tokens = 0

    def __call__(self, index, prompt_len):
        if prompt_len < 50:
            return 97
        self.tokens += 1
        time.sleep(SLOW_STEP)
        return 97


def half_open(served, stream):
    """A raw connection that has asked for 1000 tokens."""
    body = f'{{"model": "{MODEL}", "prompt": "{"x" * 60}", "max_tokens": 1000, "stream": {str(stream).lower()}}}'
    client = socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    client.sendall((head + body).encode())
    return client


def until(condition):
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it never happened")


@pytest.mark.parametrize("stream", [True, False])
def test_a_closed_connection_ends_its_request_within_two_steps_u45(stream):
    script = Paced()
    with serving(script) as served:
        client = half_open(served, stream)
        if stream:
            client.recv(4096)
        until(lambda: script.tokens > 2)
        ended = []
        abort = served.generator.abort
        served.generator.abort = lambda request_id: (ended.append(script.tokens), abort(request_id))[1]
        seen = script.tokens
        client.close()
        until(lambda: ended)
        served.check_idle()
        assert ended[0] - seen <= 3  # the step in progress when the socket closed, and two more
        assert script.tokens - ended[0] <= 2
        answer = served.post("/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 3}).json()
    assert answer["choices"][0]["text"] == "aaa"


def test_an_abort_ends_the_stream_and_an_unknown_id_changes_nothing_u45():
    script = Paced()
    with serving(script) as served:
        pieces = []

        def listen():
            body = {"model": MODEL, "prompt": "x" * 60, "max_tokens": 1000, "stream": True}
            pieces.append(served.post("/v1/completions", body, headers={"X-Request-Id": "mine"}).text)

        thread = threading.Thread(target=listen)
        thread.start()
        until(lambda: script.tokens > 2)
        assert served.post("/abort", {"request_id": "nobody"}).json()["aborted"] is False
        assert served.post("/abort", {"request_id": "cmpl-mine"}).json()["aborted"] is True
        thread.join(20)
        served.check_idle()
        assert script.tokens < 100
    assert pieces[0].count('"finish_reason":"stop"') == 1
    assert pieces[0].endswith("data: [DONE]\n\n")


def test_another_tenant_cannot_abort_a_request():
    script = Paced()
    with serving(script, options={"api_keys": ("one", "two")}) as served:
        body = {"model": MODEL, "prompt": "x" * 60, "max_tokens": 30}
        answers = []
        headers = {"Authorization": "Bearer one", "X-Request-Id": "mine"}
        thread = threading.Thread(target=lambda: answers.append(served.post("/v1/completions", body, headers=headers)))
        thread.start()
        until(lambda: script.tokens > 2)
        stranger = {"Authorization": "Bearer two"}
        assert served.post("/abort", {"request_id": "cmpl-mine"}, headers=stranger).json()["aborted"] is False
        thread.join(20)
    assert answers[0].json()["usage"]["completion_tokens"] == 30


def test_shutting_down_lets_requests_in_flight_finish():
    script = Paced()
    with serving(script) as served:
        answers = []
        body = {"model": MODEL, "prompt": "x" * 60, "max_tokens": 20}
        thread = threading.Thread(target=lambda: answers.append(served.post("/v1/completions", body)))
        thread.start()
        until(lambda: script.tokens > 2)
        served.uvicorn.should_exit = True
        thread.join(20)
    assert answers[0].json()["usage"]["completion_tokens"] == 20


def test_a_client_that_reads_late_gets_every_event_in_order():
    with serving(letters, max_model_len=2048, send_buffer=4096) as served, socket.socket() as late:
        body = {"model": MODEL, "prompt": "abc", "max_tokens": 2000, "ignore_eos": True}
        whole = served.post("/v1/completions", body).json()["choices"][0]["text"]
        content = json.dumps({**body, "stream": True}).encode()
        late.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        late.connect(("127.0.0.1", int(served.url.rpartition(":")[2])))
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        late.sendall(head.encode() + content)
        while not served.generator.has_work:
            time.sleep(0.001)
        while served.generator.has_work:  # far more than the connection holds while nobody reads it
            time.sleep(0.01)
        assert served.server.jobs
        with late.makefile("rb") as answer:
            lines = [line for line in answer.read().split(b"\n") if line.startswith(b"data: ")]
        assert lines.pop().startswith(b"data: [DONE]")
        assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines) == whole

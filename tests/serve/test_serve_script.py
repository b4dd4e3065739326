"""scripts/serve.py as users start it, with SmolLM2."""

import json
import signal
import subprocess
import sys
import time

import httpx
import openai
import pytest

from tests.environment import ROOT, environment
from trillion_infer.testing.ports import free_port

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def process_and_url(smollm2_path):
    port = free_port()
    flags = {
        "model": smollm2_path,
        "served_model_name": "smollm2",
        "port": port,
        "dtype": "float32",
        "max_running": 4,
        "prefill_chunk": 64,
        "max_model_len": 512,
        "kv_memory": 100e6,
    }
    command = [sys.executable, "scripts/serve.py", *(f"--{name}={value}" for name, value in flags.items())]
    process = subprocess.Popen(command, cwd=ROOT, env=environment())
    url = f"http://127.0.0.1:{port}"
    try:
        while not _answers(url):
            assert process.poll() is None, f"serve.py ended with status {process.returncode}"
            time.sleep(0.5)
        yield process, url
    finally:
        process.kill()
        process.wait(20)


def _answers(url):
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def client(process_and_url):
    return openai.OpenAI(base_url=f"{process_and_url[1]}/v1", api_key="none", max_retries=0, timeout=300)


def test_the_model_answers_the_same_streamed_and_not(client):
    options = {"model": "smollm2", "messages": CAPITAL, "temperature": 0, "max_tokens": 12}
    whole = client.chat.completions.create(**options).choices[0].message.content
    streamed = client.chat.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == whole
    assert "Paris" in whole


def test_logprobs_with_top_k_one_and_echo_are_json_u24(process_and_url):
    body = {"model": "smollm2", "prompt": "The capital of France is", "logprobs": 5, "top_k": 1, "echo": True}
    answer = httpx.post(f"{process_and_url[1]}/v1/completions", json={**body, "max_tokens": 3}, timeout=300)

    def refuse(name):
        raise AssertionError(name)

    logprobs = json.loads(answer.text, parse_constant=refuse)["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert len(logprobs["tokens"]) == len(logprobs["top_logprobs"]) > 3


def test_an_answer_follows_its_schema(client):
    schema = {
        "type": "object",
        "properties": {"capital": {"enum": ["Paris", "Rome"]}},
        "required": ["capital"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="smollm2",
        messages=CAPITAL,
        temperature=0,
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    )
    assert json.loads(answer.choices[0].message.content) == {"capital": "Paris"}


def test_sigterm_ends_the_server_z(process_and_url):
    process, _ = process_and_url
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) in (0, -signal.SIGTERM)

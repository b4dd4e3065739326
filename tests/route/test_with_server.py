"""The router before real servers on a scripted model."""

import httpx
import pytest

from tests.route.conftest import stream_events, text_of, wait_until
from trillion_infer.route.app import build_app
from trillion_infer.route.config import RouterConfig
from trillion_infer.serve.app import create_app
from trillion_infer.serve.options import ServerOptions
from trillion_infer.testing.byte_tokenizer import EOS, byte_tokenizer
from trillion_infer.testing.scripted import scripted_generator

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
TEXT = "The quick brown fox, jumping over the lazy dog."
CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 64}


@pytest.fixture
def servers(serve):
    """Two servers and a client of a router over them."""
    tokenizer = byte_tokenizer(chat_template=TEMPLATE)
    script = [*tokenizer.encode(TEXT), EOS]
    urls = tuple(
        serve(create_app(scripted_generator(script, tokenizer), ServerOptions("scripted"))).url for _ in range(2)
    )
    with httpx.Client(base_url=serve(build_app(RouterConfig(urls, on_worker_failure="replay"))).url) as client:
        yield urls, client


def test_a_chat_is_the_same_with_and_without_the_router(servers):
    urls, client = servers
    headers = {"x-request-id": "same"}
    direct = httpx.post(f"{urls[0]}/v1/chat/completions", json=CHAT, headers=headers).json()
    routed = client.post("/v1/chat/completions", json=CHAT, headers=headers).json()
    assert routed["choices"] == direct["choices"]
    assert routed["id"] == direct["id"]
    assert routed["choices"][0]["message"]["content"] == TEXT


def test_a_streamed_chat_is_the_whole_one(servers):
    _, client = servers
    events = stream_events(client, "/v1/chat/completions", **CHAT, stream_options={"include_usage": True})
    assert text_of(events) == TEXT
    assert events[-1] == "[DONE]"
    assert events[-2]["usage"]["completion_tokens"] == len(TEXT) + 1


def test_the_server_s_refusals_reach_the_client(servers):
    _, client = servers
    answer = client.post("/v1/chat/completions", json={**CHAT, "temperature": "hot"})
    assert answer.status_code == 400
    assert "temperature" in answer.json()["error"]["message"]


def test_other_endpoints_answer_through_the_router(servers):
    _, client = servers
    assert client.get("/health").json() == {"workers": 2, "ready": 2}
    assert client.get("/v1/models").json()["data"][0]["id"] == "scripted"
    assert client.post("/tokenize", json={"prompt": "ab"}).json()["count"] == 2
    assert client.post("/abort", json={"request_id": "none"}).json()["aborted"] is False


def test_another_replica_learns_from_the_workers_which_prefixes_they_have(servers, serve):
    urls, client = servers
    bodies = [{**CHAT, "messages": [{"role": "user", "content": letter * 600}]} for letter in "abcdef"]
    homes = [client.post("/v1/chat/completions", json=body).headers["x-worker"] for body in bodies]
    assert set(homes) == set(urls)
    second = serve(build_app(RouterConfig(urls, health_interval_s=0.1)))
    with httpx.Client(base_url=second.url) as replica:
        known = f'trillion_infer_router_worker_prefix_blocks{{worker="{urls[0]}"}} {homes.count(urls[0])}.0'
        wait_until(lambda: known in replica.get("/metrics").text)
        assert [replica.post("/v1/chat/completions", json=body).headers["x-worker"] for body in bodies] == homes

"""Streams through the router."""

import random
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.route.conftest import stream_events, text_of, wait_until
from tests.route.fake_worker import FakeWorker, answer_words


def test_a_stream_passes_through_byte_for_byte(pool):
    fake = FakeWorker()
    client = pool([fake])
    body = {"prompt": "p", "stream": True}
    through = client.post("/v1/completions", json=body).content
    fake.requests = 0
    assert through == httpx.post(f"{fake.name}/v1/completions", json=body).content


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("knob", ["break_after", "error_event_after"])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_a_replayed_stream_reads_as_if_nothing_had_failed(pool, path, knob, tokens):
    fakes = [FakeWorker(), FakeWorker()]
    client = pool(fakes, on_worker_failure="replay")
    chat = {"messages": [{"role": "user", "content": "p"}]}
    fields = {**(chat if "chat" in path else {"prompt": "p"}), "temperature": 0}
    clean = stream_events(client, path, **fields)
    first = next(fake for fake in fakes if not fake.requests)
    setattr(first, knob, tokens)
    broken = next(events for events in iter(lambda: stream_events(client, path, **fields), None) if first.requests)
    assert text_of(broken) == text_of(clean)
    assert broken[-1] == "[DONE]"
    assert len({event["id"] for event in broken[:-1]}) == 1
    finishes = [choice.get("finish_reason") for event in broken[:-1] for choice in event["choices"]]
    assert finishes.count("length") == 1


@pytest.mark.parametrize(
    ("policy", "fields", "says"),
    [
        ("error", {"temperature": 0}, "send the request again"),
        ("replay", {"temperature": 1}, "sampled without a seed"),
        ("replay", {"temperature": 0, "logprobs": 1}, "data of each token"),
    ],
)
def test_a_stream_that_cannot_be_replayed_ends_with_an_error_that_says_why(pool, policy, fields, says):
    client = pool([FakeWorker(break_after=3), FakeWorker(break_after=3)], on_worker_failure=policy)
    events = stream_events(client, prompt="p", **fields)
    assert text_of(events) == "".join(answer_words("p", 8)[:3])
    assert says in events[-1]["error"]["message"]


def test_a_replay_that_differs_ends_with_an_error_and_without_doubled_text(pool):
    fakes = [FakeWorker(break_after=4, salt="a"), FakeWorker(break_after=5, salt="b")]
    client = pool(fakes, on_worker_failure="replay")
    events = stream_events(client, prompt="p", temperature=0)
    sent = text_of(events)
    assert sent in {"".join(answer_words("p" + salt, 8)[:n]) for salt, n in (("a", 4), ("b", 5))}
    assert "differs" in events[-1]["error"]["message"]


def test_every_stream_over_breaking_workers_is_right_or_ends_with_an_error(pool):
    fakes = [FakeWorker(break_share=0.03, token_s=0.001, rng=random.Random(i)) for i in range(3)]
    client = pool(fakes, on_worker_failure="replay", breaker_cooldown_s=0.02)
    fields = {"max_tokens": 30, "temperature": 0}
    with ThreadPoolExecutor(8) as threads:
        streams = list(threads.map(lambda i: stream_events(client, prompt=f"p{i}", **fields), range(120)))
    whole = 0
    for i, events in enumerate(streams):
        words = "".join(answer_words(f"p{i}", 30))
        whole += events[-1] == "[DONE]"
        if events[-1] == "[DONE]":
            assert text_of(events) == words
        else:
            assert words.startswith(text_of(events) if "choices" in events[0] else "")
            assert events[-1]["error"]["message"]
    assert sum(fake.aborted for fake in fakes) >= 60
    assert whole >= 40


def test_a_stalled_stream_is_replayed_after_the_idle_timeout(pool):
    fakes = [FakeWorker(stall_after=2), FakeWorker()]
    client = pool(fakes, on_worker_failure="replay", idle_timeout_s=0.2)
    for _ in range(2):
        assert text_of(stream_events(client, prompt="p", temperature=0)) == "".join(answer_words("p", 8))
    assert fakes[0].requests


def test_a_client_that_leaves_is_aborted_at_the_worker_and_frees_its_load(pool):
    fake = FakeWorker(token_s=0.02)
    client = pool([fake])
    with client.stream("POST", "/v1/completions", json={"prompt": "p", "stream": True, "max_tokens": 5000}) as answer:
        next(answer.iter_raw())
    wait_until(lambda: fake.aborted == 1)
    wait_until(lambda: 'requests_in_flight{worker="' + fake.name + '"} 0.0' in client.get("/metrics").text)
    assert f'status="client_gone",worker="{fake.name}"' in client.get("/metrics").text


def test_a_client_that_leaves_before_the_first_token_is_aborted(pool):
    fake = FakeWorker(stall_after=0)
    client = pool([fake])
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json={"prompt": "p", "stream": True}, timeout=0.5)
    wait_until(lambda: fake.aborted == 1)
    wait_until(lambda: 'requests_in_flight{worker="' + fake.name + '"} 0.0' in client.get("/metrics").text)

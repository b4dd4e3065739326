"""Where requests go, measured at the workers."""

import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.route.conftest import complete, stream_events, text_of, wait_until
from tests.route.fake_worker import FakeWorker, answer_words
from trillion_infer.route.app import build_app
from trillion_infer.route.config import RouterConfig

REPOSITORY = Path(__file__).parents[2]
SESSIONS, TURNS, WORKERS = 20, 10, 3


def session_prompts(session: int) -> list[str]:
    """A growing conversation: every turn starts with all of the turn before."""
    rng = random.Random(session)
    text, prompts = f"session {session} ", []
    for _ in range(TURNS):
        text += "".join(rng.choices("abcdefgh ", k=rng.randint(600, 1000)))
        prompts.append(text)
    return prompts


def replay_sessions(send) -> None:
    """send(session, turn, prompt) for all sessions at once, each one's turns in order."""
    with ThreadPoolExecutor(8) as threads:
        for turn in range(TURNS):
            done = [threads.submit(send, s, turn, session_prompts(s)[turn]) for s in range(SESSIONS)]
            assert all(answer.result().status_code == 200 for answer in done)


def cached_share(fakes: list[FakeWorker]) -> float:
    return sum(fake.cached_tokens for fake in fakes) / sum(fake.prompt_tokens for fake in fakes)


def test_affinity_keeps_caches_warm_and_load_even_where_round_robin_does_not(pool, record_property):
    kept = [FakeWorker() for _ in range(WORKERS)]
    client = pool(kept)
    replay_sessions(
        lambda s, turn, prompt: complete(client, prompt, {"x-session-affinity": f"agent-{s}"}, max_tokens=8)
    )
    spread = [FakeWorker() for _ in range(WORKERS)]
    direct = [pool([fake]) for fake in spread]
    replay_sessions(lambda s, turn, prompt: complete(direct[(s + turn) % WORKERS], prompt, max_tokens=8))
    shares = cached_share(kept), cached_share(spread)
    even = sum(fake.prompt_tokens for fake in kept) / WORKERS
    worst = max(fake.prompt_tokens for fake in kept) / even
    record_property("cached share, affinity and round robin; load over even", (*shares, worst))
    print(f"cached share: affinity {shares[0]:.3f}, round robin {shares[1]:.3f}; load {worst:.3f} of even")
    assert shares[0] >= 0.8
    assert shares[0] > shares[1] + 0.1
    assert worst <= 1.25


def test_prefix_awareness_alone_keeps_conversations_on_their_workers(pool):
    fakes = [FakeWorker() for _ in range(WORKERS)]
    client = pool(fakes)
    replay_sessions(lambda s, turn, prompt: complete(client, prompt, max_tokens=8))
    assert cached_share(fakes) >= 0.75


def test_two_replicas_send_a_session_to_the_same_worker(pool, serve):
    fakes = [FakeWorker() for _ in range(WORKERS)]
    one = pool(fakes)
    urls = tuple(fake.name for fake in reversed(fakes))
    with httpx.Client(base_url=serve(build_app(RouterConfig(urls))).url) as two:
        for i in range(SESSIONS):
            headers = {"x-session-affinity": f"agent-{i}"}
            chosen = {complete(client, "p", headers).headers["x-worker"] for client in (one, two)}
            assert len(chosen) == 1, chosen


def test_a_hot_shared_prefix_spreads_over_the_workers(pool):
    fakes = [FakeWorker(token_s=0.002) for _ in range(WORKERS)]
    client = pool(fakes)
    system = "You are a helpful assistant. " * 300
    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(lambda i: complete(client, f"{system}{i}", max_tokens=8), range(120)))
    assert all(answer.status_code == 200 for answer in answers)
    assert max(fake.requests for fake in fakes) <= 1.25 * 120 / WORKERS, [fake.requests for fake in fakes]
    assert cached_share(fakes) >= 0.9


def test_a_hot_prefix_in_a_slow_trickle_does_not_stay_on_one_worker(pool):
    fakes = [FakeWorker() for _ in range(WORKERS)]
    client = pool(fakes, spill_tokens=500)
    system = "You are a helpful assistant. " * 100
    for i in range(90):
        complete(client, f"{system}{i}", max_tokens=100)
    assert min(fake.requests for fake in fakes) >= 10, [fake.requests for fake in fakes]


def test_a_slow_worker_gets_less(pool):
    fakes = [FakeWorker(token_s=0.05), FakeWorker(token_s=0.002), FakeWorker(token_s=0.002)]
    client = pool(fakes)
    with ThreadPoolExecutor(9) as threads:
        list(threads.map(lambda i: complete(client, f"{i}" * 400, max_tokens=8), range(120)))
    assert fakes[0].requests < min(fakes[1].requests, fakes[2].requests) / 2, [fake.requests for fake in fakes]


def test_failing_workers_lose_no_request_and_their_circuit_opens(pool):
    bad, good = FakeWorker(status=500), FakeWorker()
    client = pool([bad, good], breaker_failures=3, breaker_cooldown_s=1000.0)
    answers = [complete(client, f"{i}") for i in range(30)]
    assert {answer.status_code for answer in answers} == {200}
    assert bad.requests == 3
    assert f'circuit_open{{worker="{bad.name}"}} 1.0' in client.get("/metrics").text


def test_a_circuit_closes_once_the_worker_answers_again(pool):
    bad, good = FakeWorker(status=500), FakeWorker()
    client = pool([bad, good], breaker_failures=1, breaker_cooldown_s=0.05)
    wait_until(lambda: complete(client, "p").status_code == 200 and bad.requests > 0)
    bad.status, seen = 200, bad.requests
    wait_until(lambda: complete(client, "p").status_code == 200 and bad.requests > seen)
    assert f'circuit_open{{worker="{bad.name}"}} 0.0' in client.get("/metrics").text


def test_health_takes_a_worker_out_and_back(pool):
    sick, well = FakeWorker(), FakeWorker()
    client = pool([sick, well])
    sick.healthy = False
    wait_until(lambda: client.get("/health").json()["ready"] == 1)
    seen = sick.requests
    assert {complete(client, f"{i}").status_code for i in range(10)} == {200}
    assert sick.requests == seen
    sick.healthy = True
    wait_until(lambda: client.get("/health").json()["ready"] == 2)


def test_without_a_worker_requests_and_health_say_503(pool):
    fake = FakeWorker(healthy=False)
    client = pool([fake])
    assert client.get("/health").status_code == 503
    answer = complete(client, "p")
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert "no worker" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_full_workers_mean_429_with_retry_after_and_no_queue(pool, stream):
    fakes = [FakeWorker(stall_after=0, token_s=1000.0) for _ in range(2)]
    client = pool(fakes, max_requests_per_worker=2)
    held = [threading.Thread(target=_held, args=(client, stream), daemon=True) for _ in range(4)]
    for thread in held:
        thread.start()
    wait_until(lambda: sum(fake.running for fake in fakes) == 4)
    answer = complete(client, "p", stream=stream)
    assert answer.status_code == 429
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert sum(fake.requests for fake in fakes) == 4
    for thread in held:
        thread.join()


def _held(client: httpx.Client, stream: bool) -> None:
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json={"prompt": "p", "stream": stream}, timeout=2)


def test_a_busy_worker_is_passed_over_and_its_circuit_stays_closed(pool):
    busy, free = FakeWorker(status=429), FakeWorker()
    client = pool([busy, free], breaker_failures=1)
    assert {complete(client, f"{i}").status_code for i in range(6)} == {200}
    assert f'circuit_open{{worker="{busy.name}"}} 0.0' in client.get("/metrics").text
    free.status = 429
    answer = complete(client, "p")
    assert (answer.status_code, bool(answer.headers["retry-after"])) == (429, True)


def test_draining_finishes_what_runs_and_sends_new_requests_elsewhere(pool):
    fakes = [FakeWorker(token_s=0.01), FakeWorker(token_s=0.01)]
    client = pool(fakes, admin_key="k")
    admin = {"authorization": "Bearer k"}
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(stream_events, client, prompt="p", max_tokens=100)
        wait_until(lambda: sum(fake.running for fake in fakes) == 1)
        drained = next(fake for fake in fakes if fake.running)
        answer = client.post("/admin/drain", params={"worker": drained.name}, headers=admin)
        assert answer.json() == {"worker": drained.name, "draining": True, "requests": 1}
        for i in range(5):
            assert complete(client, f"{i}", max_tokens=1).headers["x-worker"] != drained.name
        assert text_of(running.result()) == "".join(answer_words("p", 100))
    rows = client.get("/admin/workers", headers=admin).json()["workers"]
    assert [row["requests"] for row in rows] == [0, 0]
    client.post("/admin/resume", params={"worker": drained.name}, headers=admin)
    wait_until(lambda: complete(client, "q", max_tokens=1).headers["x-worker"] == drained.name)


def test_admin_needs_the_key_and_a_known_worker(pool):
    client = pool([FakeWorker()], admin_key="k")
    assert client.post("/admin/drain").status_code == 401
    assert client.get("/admin/workers", headers={"authorization": "Bearer j"}).status_code == 401
    assert client.post("/admin/drain?worker=x", headers={"authorization": "Bearer k"}).status_code == 404
    assert pool([FakeWorker()]).post("/admin/drain").status_code == 404


def test_request_ids_and_headers_travel_both_ways(pool):
    fake = FakeWorker()
    client = pool([fake])
    answer = complete(client, "p", {"x-request-id": "mine-1", "authorization": "Bearer key"})
    assert answer.headers["x-request-id"] == fake.headers[0]["x-request-id"] == "mine-1"
    assert fake.headers[0]["authorization"] == "Bearer key"
    assert complete(client, "p").headers["x-request-id"].startswith("req-")
    assert complete(client, "p", {"x-request-id": "a b"}).headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize(
    ("body", "status"), [(b"{", 400), (b"[]", 400), (b"[" * 100_000, 400), (b'{"prompt":"' + b"x" * 5000 + b'"}', 413)]
)
def test_bad_bodies_are_refused_in_openai_s_shape(pool, body, status):
    answer = pool([FakeWorker()], max_body_bytes=4000 if status == 413 else 10**6).post("/v1/completions", content=body)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405)])
def test_unknown_paths_and_methods_are_refused_in_openai_s_shape(pool, method, path, status):
    answer = pool([FakeWorker()]).request(method, path)
    assert answer.status_code == status
    assert path in answer.json()["error"]["message"]


def test_what_a_worker_refuses_reaches_the_client_and_is_not_retried(pool):
    fakes = [FakeWorker(status=400), FakeWorker(status=400)]
    client = pool(fakes)
    assert complete(client, "p").json()["error"]["message"] == "told to"
    assert sum(fake.requests for fake in fakes) == 1


def test_an_abort_reaches_the_worker_that_has_the_request(pool):
    fakes = [FakeWorker() for _ in range(WORKERS)]
    client = pool(fakes)
    for fake in fakes:
        assert client.post("/abort", json={"request_id": fake.name}).json() == {
            "request_id": fake.name,
            "aborted": True,
        }
    assert client.post("/abort", json={"request_id": "x"}).json()["aborted"] is False


def test_models_are_those_of_a_worker(pool):
    fake = FakeWorker()
    assert pool([fake]).get("/v1/models").json()["data"][0]["id"] == fake.name


def test_killing_a_worker_mid_run_loses_no_request(serve):
    """20 streams and 40 whole requests over three processes, one of which is killed while it streams."""
    command = [sys.executable, "-m", "tests.route.fake_worker", "--token_s=0.01"]
    workers = [subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) for _ in range(WORKERS)]
    try:
        urls = tuple(worker.stdout.readline().strip() for worker in workers)
        config = RouterConfig(urls, on_worker_failure="replay", health_interval_s=0.1, connect_timeout_s=20)
        with (
            httpx.Client(base_url=serve(build_app(config)).url, timeout=60) as client,
            ThreadPoolExecutor(30) as threads,
        ):
            streams = [
                threads.submit(stream_events, client, prompt=f"s{i}", max_tokens=300, temperature=0) for i in range(20)
            ]
            whole = [threads.submit(complete, client, f"w{i}", max_tokens=20) for i in range(40)]
            wait_until(lambda: "first_token_seconds_count 20.0" in client.get("/metrics").text)
            workers[0].kill()
            for i, answer in enumerate(streams):
                assert text_of(answer.result()) == "".join(answer_words(f"s{i}", 300)), answer.result()[-1]
            for i, answer in enumerate(whole):
                assert answer.result().json()["choices"][0]["text"] == "".join(answer_words(f"w{i}", 20))
            page = client.get("/metrics").text
        assert 'replays_total{outcome="started"}' in page
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
            worker.stdout.close()


def test_sessions_of_a_dead_worker_move_and_the_others_stay(pool):
    fakes = [FakeWorker() for _ in range(WORKERS)]
    client = pool(fakes)
    headers = [{"x-session-affinity": f"agent-{i}"} for i in range(9)]
    before = [complete(client, "p", header).headers["x-worker"] for header in headers]
    fakes[0].healthy = False
    wait_until(lambda: client.get("/health").json()["ready"] == 2)
    after = [complete(client, "p", header).headers["x-worker"] for header in headers]
    for old, new in zip(before, after, strict=True):
        assert new == old if old != fakes[0].name else new != old

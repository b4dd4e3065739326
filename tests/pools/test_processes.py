"""Prefill and decode in processes of their own, under a router: right answers, failures, roles."""

import random
import threading
import time

import httpx
import pytest

from tests.pools.workers import ADMIN, NAME, Outcome, Worker, body, fetch, wait_until
from trillion_infer import SamplingParams

DEADLINE_S = 100.0
"""No request may take longer, whatever dies: several deadlines of 30 s and restarts."""


def prompt_of(rng: random.Random, length: int) -> str:
    return "".join(chr(rng.randrange(40, 120)) for _ in range(length))


def requests_of(seed: int, count: int, tokens: int = 24) -> list[dict]:
    """Greedy and seeded requests, some with a shared beginning."""
    rng = random.Random(seed)
    stem = prompt_of(rng, 40)
    return [
        body((stem if rng.random() < 0.4 else "") + prompt_of(rng, rng.randint(4, 90)), tokens, i if i % 2 else None)
        for i in range(count)
    ]


def expected_texts(llm, requests: list[dict]) -> list[str]:
    params = [
        SamplingParams(
            temperature=each["temperature"], seed=each.get("seed"), max_tokens=each["max_tokens"], ignore_eos=True
        )
        for each in requests
    ]
    return [output.outputs[0].text for output in llm.generate([each["prompt"] for each in requests], params)]


def run_all(url: str, requests: list[dict], while_running=None, gap_s: float = 0.0) -> list[Outcome]:
    """All at once, each client on a thread; `while_running` on this one."""
    outcomes: list[Outcome] = [Outcome() for _ in requests]

    def one(place: int) -> None:
        outcomes[place] = fetch(url, requests[place])

    threads = []
    for place in range(len(requests)):
        threads.append(threading.Thread(target=one, args=(place,), daemon=True))
        threads[-1].start()
        time.sleep(gap_s)
    if while_running is not None:
        while_running()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "a request has no end"
    return outcomes


def check(outcomes: list[Outcome], texts: list[str]) -> int:
    """Every request ended rightly, or with an error that says something; returns how many rightly."""
    right = 0
    for outcome, text in zip(outcomes, texts, strict=True):
        assert outcome.seconds < DEADLINE_S
        if outcome.error is None:
            assert (outcome.text, outcome.reason) == (text, "length")
            right += 1
        else:
            assert len(outcome.error) > 10
            assert text.startswith(outcome.text), "what came before the error is wrong"
    return right


def all_home(workers: list[Worker]) -> None:
    """Nothing is held for anybody once all is quiet."""

    def quiet() -> bool:
        states = [worker.state() for worker in workers]
        return all(state and state.get("held") == state.get("kv_in_use") == 0 for state in states)

    wait_until(quiet, 30, lambda: str([worker.state() for worker in workers]))


def test_streams_equal_one_engine(deployment, colocated):
    prefill, decode, router = deployment
    requests = requests_of(1, 24)
    outcomes = run_all(router.url, requests)
    assert check(outcomes, expected_texts(colocated, requests)) == len(requests)
    assert sum(worker.metric("trillion_infer:handoffs") for worker in decode) > 0
    assert all(worker.metric("trillion_infer:handoff_leases") > 0 for worker in prefill)
    assert sum(worker.metric("trillion_infer:handoff_transfer_seconds_count") for worker in decode) > 0
    all_home([*prefill, *decode])


def test_a_prefill_worker_takes_no_clients(deployment):
    answer = httpx.post(f"{deployment[0][0].url}/v1/completions", json=body("abc", 2), timeout=30)
    assert answer.status_code == 429
    assert "send them to a decode worker" in answer.json()["error"]["message"]


def test_the_timeline_has_lanes_of_both_roles(deployment):
    prefill, decode, router = deployment
    assert fetch(router.url, body("x" * 80, 8)).error is None
    lanes = set()
    for worker in (*prefill, *decode):
        events = httpx.get(f"{worker.url}/admin/timeline", headers=ADMIN, timeout=30).json()["traceEvents"]
        lanes |= {event["cat"] for event in events if event["ph"] == "X"}
    assert {"prefill", "transfer", "decode"} <= lanes
    assert httpx.get(f"{decode[0].url}/admin/timeline", timeout=30).status_code == 401


def test_a_worker_changes_its_role_while_requests_run(deployment, colocated):
    prefill, _, router = deployment

    def switch(role: str) -> None:
        answer = httpx.post(f"{prefill[1].url}/admin/role", json={"role": role}, headers=ADMIN, timeout=30)
        assert answer.status_code == 200, answer.text
        wait_until(lambda: (prefill[1].state() or {}).get("role") == role, 60, lambda: str(prefill[1].state()))

    requests = requests_of(2, 12)
    texts = expected_texts(colocated, requests)
    assert check(run_all(router.url, requests, lambda: switch("decode"), 0.02), texts) == len(requests)
    switched = fetch(prefill[1].url, requests[0])
    assert switched.text == texts[0]
    assert check(run_all(router.url, requests, lambda: switch("prefill"), 0.02), texts) == len(requests)
    answer = httpx.post(f"{prefill[1].url}/admin/role", json={"role": "cook"}, headers=ADMIN, timeout=30)
    assert answer.status_code == 400


def _ready(router) -> int:
    """Decode workers that the router would use."""
    return httpx.get(f"{router.url}/health", timeout=10).json()["ready"]


def storm(deployment, colocated, seed: int, kills: int) -> None:
    """kill -9 of a random worker at a random moment under load, again and again; the dead one is started again."""
    prefill, decode, router = deployment
    rng = random.Random(seed)
    right = total = 0
    for number in range(kills):
        victim = rng.choice([*prefill, *decode])
        requests = requests_of(seed * 1000 + number, 10, 40)

        def strike(victim=victim) -> None:
            time.sleep(rng.uniform(0.0, 0.6))
            victim.kill()
            victim.start()

        outcomes = run_all(router.url, requests, strike, 0.03)
        right += check(outcomes, expected_texts(colocated, requests))
        total += len(requests)
        victim.wait()
        wait_until(lambda: _ready(router) == len(decode), 60, "the router does not take a worker back")
    assert right >= 0.9 * total, f"{right} of {total} requests ended rightly"
    all_home([*prefill, *decode])
    assert fetch(router.url, body("after the storm", 8)).error is None


def test_killed_workers_lose_no_token(deployment, colocated):
    storm(deployment, colocated, 1, 2)


@pytest.mark.slow
def test_thirty_killed_workers_lose_no_token(deployment, colocated):
    storm(deployment, colocated, 2, 30)


def test_the_model_is_named_alike(deployment):
    models = httpx.get(f"{deployment[2].url}/v1/models", timeout=30).json()
    assert models["data"][0]["id"] == NAME

"""Pools of two jax.distributed processes each, under a router: one engine's tokens, and an end whoever dies."""

import contextlib
import random
import time

import httpx
import pytest

from tests.pools.conftest import deployed
from tests.pools.test_processes import all_home, check, expected_texts, requests_of, run_all
from tests.pools.workers import ADMIN, RouterProcess, streamed, tiny_model, wait_until

EXIT_LOST = 3


@pytest.fixture(scope="module")
def hosts(pool_model):
    """A prefill and a decode worker of two processes each. A step that compiles must not pass for silence."""
    roles = [("prefill", "tensor=2", True), ("decode", "tensor=2", True)]
    patient = ("--silence_s=30", "--lease_s=60", "--deadline_s=120")
    with deployed(pool_model, roles, "--noprecompile", *patient) as pools:
        yield pools


def leave_early(url: str, request: dict) -> None:
    """A client that goes away after the first event."""
    stream = streamed(url, {**request, "max_tokens": 400})
    next(stream)
    stream.close()


def test_streams_over_hosts_equal_one_engine_and_pages_come_home(hosts, colocated):
    """Greedy and seeded, with shared beginnings, while other clients leave in the middle."""
    (prefill,), (decode,), router = hosts
    requests = requests_of(11, 12)

    def leave() -> None:
        for request in requests[:2]:
            leave_early(router.url, request)

    outcomes = run_all(router.url, requests, leave)
    assert check(outcomes, expected_texts(colocated, requests)) == len(requests)
    assert decode.metric("trillion_infer:handoffs") >= len(requests) / 2
    assert decode.metric("trillion_infer:handoff_recomputed") == 0
    assert prefill.metric("trillion_infer:handoff_leases") > 0
    all_home([prefill, decode])


def test_a_follower_that_is_killed_ends_its_pool_and_no_request(hosts, colocated):
    """The decode worker computes what the prefill pool owed it, and the pool's leader ends."""
    (prefill,), (decode,), router = hosts
    requests = requests_of(12, 8)

    def strike() -> None:
        time.sleep(0.05)
        prefill.processes[1].kill()

    outcomes = run_all(router.url, requests, strike)
    assert check(outcomes, expected_texts(colocated, requests)) == len(requests)
    assert prefill.process.child.wait(20) == EXIT_LOST
    assert any("process 1" in line and "is lost" in line for line in prefill.process.lines), prefill.process.tail()
    all_home([decode])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "meshes"),
    [
        ("smollm2", ("tensor=2", "tensor=2", "tensor=1")),
        ("deepseek_v3", ("expert=2", "tensor=2", "tensor=1")),
        ("deepseek_v3", ("stage=2", "stage=2", "tensor=1")),
    ],
    ids=["smollm2", "mla-moe", "mla-moe-stages"],
)
def test_pools_over_hosts_change_roles_and_survive_kills(tmp_path, make_llm, model, meshes):
    """60 requests; 12 while the prefill pool becomes a decode pool and comes back; then six times 10 while a random
    process of a random pool is killed with kill -9, after which the whole pool ends and is started again."""
    path = tiny_model(tmp_path / model, model)
    llm = make_llm.fresh(path, max_running=8, prefill_chunk=64, page_size=8, kv_memory=8e6)
    roles = [
        (role, mesh, mesh != "tensor=1") for role, mesh in zip(("prefill", "decode", "decode"), meshes, strict=True)
    ]
    with contextlib.closing(llm), deployed(path, roles) as (prefill, decode, router):
        requests = requests_of(21, 60)
        assert check(run_all(router.url, requests), expected_texts(llm, requests)) == len(requests)
        assert sum(worker.metric("trillion_infer:handoffs") for worker in decode) >= 30
        all_home([*prefill, *decode])

        def switch(role: str) -> None:
            answer = httpx.post(f"{prefill[0].url}/admin/role", json={"role": role}, headers=ADMIN, timeout=30)
            assert answer.status_code == 200, answer.text
            wait_until(lambda: (prefill[0].state() or {}).get("role") == role, 60, lambda: str(prefill[0].state()))

        for role in ("decode", "prefill"):
            requests = requests_of(22, 12)
            outcomes = run_all(router.url, requests, lambda role=role: switch(role), 0.02)
            assert check(outcomes, expected_texts(llm, requests)) == len(requests)
        all_home([*prefill, *decode])

        rng, right = random.Random(23), 0
        for number in range(6):
            victim = rng.choice([worker for worker in (*prefill, *decode) if len(worker.processes) > 1])
            requests = requests_of(100 + number, 10, 40)

            def strike(victim=victim) -> None:
                time.sleep(rng.uniform(0.0, 0.6))
                rng.choice(victim.processes).kill()

            outcomes = run_all(router.url, requests, strike, 0.03)
            right += check(outcomes, expected_texts(llm, requests))
            for process in victim.processes:
                process.child.wait(20)
            victim.start()
            victim.wait()
            wait_until(lambda: _ready(router) == len(decode), 60, "the router does not take a worker back")
        assert right >= 54, f"{right} of 60 requests ended rightly"
        all_home([*prefill, *decode])


def _ready(router: RouterProcess) -> int:
    return httpx.get(f"{router.url}/health", timeout=10).json()["ready"]

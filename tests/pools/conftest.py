"""Pools that tests share: two prefill workers, two decode workers and a router, as processes."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pools.workers import RouterProcess, Worker, tiny_model
from trillion_infer.testing.ports import free_ports

Pools = tuple[list[Worker], list[Worker], RouterProcess]
"""Prefill workers, decode workers, router."""


@contextlib.contextmanager
def deployed(model: Path, roles: list[tuple[str, str, bool]], *flags: str) -> Iterator[Pools]:
    """Workers of (role, mesh, is two processes), and their router."""
    ports = free_ports(3 * len(roles))
    with contextlib.ExitStack() as started:
        workers: list[Worker] = []
        for role, mesh, spans in roles:
            http, handoff, coordinator = (ports.pop() for _ in range(3))
            meet = coordinator if spans else None
            workers.append(Worker(model, role, http, handoff, f"--mesh={mesh}", *flags, coordinator=meet))
            started.callback(workers[-1].end)
        for worker in workers:
            worker.wait()
        prefill, decode = ([w for w in workers if w.role == role] for role in ("prefill", "decode"))
        router = RouterProcess(prefill, decode)
        started.callback(router.process.kill)
        yield prefill, decode, router


@pytest.fixture(scope="session")
def pool_model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("pools") / "tiny")


@pytest.fixture(scope="module")
def deployment(pool_model):
    """(prefill workers, decode workers, router)."""
    ports = free_ports(8)
    # The first compiles, and the others load what it has compiled.
    prefill = [Worker(pool_model, "prefill", ports[0], ports[2])]
    decode: list[Worker] = []
    try:
        prefill[0].wait()
        prefill.append(Worker(pool_model, "prefill", ports[1], ports[3]))
        decode = [Worker(pool_model, "decode", ports[i + 4], ports[i + 6]) for i in range(2)]
        for worker in (*prefill, *decode):
            worker.wait()
        router = RouterProcess(prefill, decode)
        yield prefill, decode, router
        router.process.kill()
    finally:
        for worker in (*prefill, *decode):
            worker.end()


@pytest.fixture(scope="session")
def colocated(pool_model):
    """The same model in this process: what the right answers are."""
    from trillion_infer import LLM

    llm = LLM(pool_model, dtype="float32", max_running=8, prefill_chunk=64, page_size=8, kv_memory=8e6)
    yield llm
    llm.close()
